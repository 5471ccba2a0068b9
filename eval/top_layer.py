"""Reading a prompt for its last logits: the top layer's other rows are needed for their keys and
values only, so their queries, attention and MLP are left out."""
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

    def forward(
        hidden_BTM: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Any:
        num_idle = hidden_BTM.shape[1] - num_rows
        # Without a cache the rows behind would not see them.
        if num_idle <= 0 or attention_mask is not None or others.get("past_key_values") is None:
            return whole(
                hidden_BTM,
                attention_mask=attention_mask,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                **others,
            )

        def cut(rows: slice) -> dict[str, Any]:
            return {
                "attention_mask": None,
                "position_ids": None if position_ids is None else position_ids[:, rows],
                "position_embeddings": position_embeddings
                and tuple(x_BTD[:, rows] for x_BTD in position_embeddings),
            }

        idle, last = slice(0, num_idle), slice(num_idle, None)
        normed_BTM = layer.input_layernorm(hidden_BTM[:, idle])
        layer.self_attn(normed_BTM, **cut(idle), **others, bosch_no_output=True)
        return whole(hidden_BTM[:, last], **cut(last), **others)

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
