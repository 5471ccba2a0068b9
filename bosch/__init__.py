"""BOSCH: turn a full-attention language model into a hybrid of full and sliding-window KV groups.

`import bosch` makes transformers know `attn_implementation="bosch"` and the hybrid models, so that
`AutoModelForCausalLM.from_pretrained(folder)` loads a materialized folder. It loads neither torch
nor transformers.
"""

from bosch.hybrid.registration import register_with_transformers

register_with_transformers()
