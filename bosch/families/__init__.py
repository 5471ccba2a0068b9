"""One file a model family; the file's name is the `model_type` it turns into a hybrid."""
