"""One file a model family; the file's name is the `model_type` it turns into a hybrid."""

NEEDS = ("plain_config_class", "plain_model_class", "config_class", "model_class")
