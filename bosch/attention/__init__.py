"""What computes attention: the call and its backends, the function registered with transformers,
packed documents, the KV cache of a hybrid, and the masks of a search."""
