"""Prefill for the last logits only: at all other positions the top layer computes keys and values,
and skips queries, attention and MLP."""
# B batch, T tokens, M model size, D head size

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bosch.hybrid.attention import NAME


@contextmanager
def last_rows_only(model: Any, num_rows: int | None) -> Iterator[None]:
    """Within it the top layer returns its last rows alone. Models whose layers are not built as
    most are (a norm, then `self_attn`) compute all of them, and so does None."""
    layer = top_layer(model)
    if num_rows is None or layer is None:
        yield
        return
    whole, own = layer.forward, vars(layer).get("forward")  # own: accelerate's hooks put one there

    def forward(hidden_BTM: Tensor, **inputs: Any) -> Any:
        num_idle = hidden_BTM.shape[1] - num_rows
        is_masked = inputs.get("attention_mask") is not None
        # Without a cache the last positions would not see the others.
        if num_idle <= 0 or is_masked or inputs.get("past_key_values") is None:
            return whole(hidden_BTM, **inputs)

        def cut(rows: slice) -> dict[str, Any]:
            ids, turns = inputs.get("position_ids"), inputs.get("position_embeddings")
            return inputs | {
                "position_ids": None if ids is None else ids[:, rows],
                "position_embeddings": turns and tuple(x_BTD[:, rows] for x_BTD in turns),
            }

        idle, last = slice(0, num_idle), slice(num_idle, None)
        normed_BTM = layer.input_layernorm(hidden_BTM[:, idle])
        layer.self_attn(normed_BTM, **{"attention_mask": None} | cut(idle), bosch_no_output=True)
        return whole(hidden_BTM[:, last], **cut(last))

    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward  # the class's is in its place again
        else:
            layer.forward = own


def top_layer(model: Any) -> Any:
    """None where the parts have other names or the attention is not ours."""
    layers = getattr(model.get_decoder(), "layers", None)
    if model.config._attn_implementation != NAME or not layers:
        return None
    known = all(hasattr(layers[-1], name) for name in ("input_layernorm", "self_attn"))
    return layers[-1] if known else None
