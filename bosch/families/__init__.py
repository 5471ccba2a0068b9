"""One file for each model family, named after the `model_type` of the plain models. It defines the
names in NEEDS and, where they apply:

    block_norms         the names of a block's norms (`BlockNorms` in bosch/hybrid/models.py).
                        Without them the search runs every block as a whole, which takes longer.
    head_dimensions     attention parameters beside the usual ones that have one part per head, and
                        the dimension that holds the heads (bosch/hybrid/conversion.py)
    fused               attention parameters that hold several projections, and which in what order,
                        as {"qkv_proj.weight": "qkv"}
    logit_factor        a function of the config: what the model multiplies its head's output by
    served_by_vllm      True: serving/vllm has vLLM's model of the family (a test holds them equal)
    kernels_compared    True: tests/liger_program.py compares Liger's fused kernels with its own
                        norms, MLPs and rotations; without, torch's are used
    layer_types_suffice True: its layers differ in their windows alone, so that a hybrid of whole
                        layers can be written as the plain model with other `layer_types`
"""

NEEDS = ("plain_config_class", "plain_model_class", "config_class", "model_class")
