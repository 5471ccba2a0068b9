"""KVzip: how much attention a group pays to a text while the model repeats it.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", section
4.2. The model reads a text, is asked to repeat it, and is given the repetition, 2,000 tokens at a
time. A key of the text counts as much as the most attention that any of these tokens pays to it, in
any query head of its group; a group counts as much as its strongest key, over all texts. A large
score is global. The texts are the haystacks, without a chat template. The authors place it above
DuoAttention's trained scores, on models of 7B and more: not repeated here.

Memory grows with the text, whose keys and values are kept, and not with its square: a process
with two layers of SmolLM2's shape has at most .7 GiB at 8,192 tokens and 1.4 at 32,768, where one
matrix of attention would have 36. With gradients too: two layers of four small heads add 323 MiB to
a process at 8,192 tokens and 492 at 32,768 (a matrix: 16 GiB), without gradients 211 and 283."""
# L layers, H query heads, G kv heads, R query heads a group, D head size, E size of the residual
# stream, T tokens of the text, K keys of the part that is repeated, Q tokens given, C of them in a
# chunk of rows, S keys that they see

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from bosch.attention.cache import CACHE
from bosch.calibration import Haystack
from bosch.hybrid.models import logits_of
from bosch.masks.window import full_layers
from bosch.method import Inputs, MethodTraits, Scores
from bosch.methods._examples import Result, measure_haystacks
from bosch.methods._statistics import LEAST_ROWS, row_scores
from bosch.methods.fisher import HEAD_ROWS, computing_again
from bosch.run.errors import UserError
from bosch.run.progress import say

traits = MethodTraits(measures=True)

PROMPT = "\n\nRepeat the previous context exactly."
NEXT_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with"
OVERLAP_TOKENS = 8  # of the part before, with which a later prompt names its part


@dataclass(frozen=True)
class Settings:
    """The defaults are the paper's."""

    # A group's score from those of its keys: the largest, the mean, or a quantile. One key is
    # enough for a high maximum, so most groups of a model may be close to 1.
    statistic: Literal["max", "mean", "quantile"] = "max"
    quantile: float = 0.99
    # True: attention to the last `window` tokens does not count, because a window sees them. The
    # prompt begins right after the text, so by the maximum even a head that attends to the
    # token before counts as global.
    beyond_window: bool = False
    # gradient: attention is multiplied by |v W_O|, the length of what a key adds to the residual
    # stream, and by the length of the gradient there, of the loss on the repetition (like KVgrad,
    # which takes the gradient of the last hidden states' squared length).
    weighted_by: Literal["nothing", "gradient"] = "nothing"
    chunk_tokens: int = 2_000  # repeated at a time
    sink_tokens: int = 4  # first tokens that do not count: every head may attend to them

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise UserError(f"quantile is {self.quantile}, it must be above 0 and at most 1.")
        if self.chunk_tokens < 1 or self.sink_tokens < 0:
            problem = f"chunk_tokens {self.chunk_tokens}, sink_tokens {self.sink_tokens}"
            raise UserError(f"{problem}: they must be at least 1 and 0.")


def score_groups(inputs: Inputs) -> Scores:
    settings: Settings = inputs.settings
    tokenizer = inputs.load_tokenizer()

    def encode(text: str) -> list[int]:  # a model without a tokenizer gets no prompt
        return tokenizer.encode(text, add_special_tokens=False) if tokenizer else []

    prompts = encode(PROMPT + "\n"), encode(NEXT_PROMPT), encode("\n")
    positions = inputs.model.config.max_position_embeddings
    room = positions - max(len(prompts[0]), len(prompts[1] + prompts[2]) + OVERLAP_TOKENS)
    chunk_tokens = min(settings.chunk_tokens, room // 2)
    most = room - chunk_tokens
    if most <= settings.sink_tokens:
        raise UserError(f"kvzip: {positions} positions are too few for a text and its repetition.")
    shortest = min(len(haystack.ids_T) for haystack in inputs.calibration.haystacks)
    if shortest <= settings.sink_tokens:
        problem = f"sink_tokens {settings.sink_tokens} leave nothing of a text of {shortest} tokens"
        raise UserError(f"kvzip: {problem}; choose fewer, or a set with longer texts.")
    if inputs.calibration.longest > most:
        say(f"kvzip repeats the first {most:,} tokens: {positions:,} positions have to hold both")

    def measure(haystack: Haystack) -> Result:
        keys_LGT = score_keys(inputs, haystack.ids_T[:most], prompts, chunk_tokens)
        keys_LGT = keys_LGT[..., settings.sink_tokens :]
        if settings.statistic == "mean":
            groups_LG = keys_LGT.mean(-1, dtype=torch.float64)
        else:
            share = settings.quantile if settings.statistic == "quantile" else 1
            # Not torch.quantile, which refuses more than 2^24 numbers.
            groups_LG = keys_LGT.kthvalue(math.ceil(share * keys_LGT.shape[-1]), -1).values
        return {"groups": groups_LG.tolist()}

    results = measure_haystacks(inputs, "kvzip", measure)
    table = torch.tensor([result["groups"] for result in results], dtype=torch.float64)
    over_texts = table.amax(0) if settings.statistic == "max" else table.mean(0)
    return Scores(tuple(map(tuple, over_texts.tolist())), "global")


class TextCache(DynamicCache):
    """Keys and values of a text. Once it is complete, calls see it followed by their own keys,
    which are not kept: so a layer can be computed again in a backward pass."""

    is_complete = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_complete:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        keys = torch.cat([layer.keys, key_states], dim=2)
        return keys, torch.cat([layer.values, value_states], dim=2)


def score_keys(
    inputs: Inputs, ids_T: Tensor, prompts: tuple[list[int], ...], chunk_tokens: int
) -> Tensor:
    """(L, G, T) on the CPU: for each key of a text the largest attention that it gets in its group
    while the text is repeated."""
    settings: Settings = inputs.settings
    model, cache = inputs.model, TextCache()
    ids_T = ids_T.to(model.device)
    with torch.no_grad():
        model.base_model(ids_T[None], **{CACHE: cache})
    cache.is_complete = True
    parts = []
    for start in range(0, len(ids_T), chunk_tokens):
        first, later, end = prompts
        before = ids_T[max(0, start - OVERLAP_TOKENS) : start].tolist()
        prompt = [*later, *before, *end] if start else first
        part = slice(start, min(start + chunk_tokens, len(ids_T)))
        given_Q = torch.cat([ids_T.new_tensor(prompt), ids_T[part]])
        gradient_LQ = None
        if settings.weighted_by == "gradient":
            gradient_LQ = gradient_lengths(model, cache, given_Q, len(prompt))
        scores: list[Tensor] = []
        observe = partial(observe_layer, inputs, part, gradient_LQ, scores)
        with torch.no_grad():
            model.base_model(given_Q[None], bosch_observe=observe, **{CACHE: cache})
        parts.append(torch.stack(scores))
    return torch.cat(parts, -1)


def observe_layer(
    inputs: Inputs, part: slice, gradient_LQ: Tensor | None, scores: list[Tensor],
    layer: int, q_BHQD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scaling: float, out: Tensor,
) -> Tensor:  # fmt: skip
    """Append the scores of the layer's keys in the part that is repeated, (G, K)."""
    settings: Settings = inputs.settings
    q_HQD, k_GSD, v_GKD = q_BHQD[0], k_BGSD[0], v_BGSD[0, :, part]
    num_heads, num_given, _ = q_HQD.shape
    num_sinks, text_tokens = min(settings.sink_tokens, part.start), k_GSD.shape[1] - num_given
    # As in the paper's code, the softmax leaves out the other parts of the text: the cost does not
    # grow with its square.
    #
    #     text          sinks ....... | part of K keys | .......
    #     keys seen     sinks         | part of K keys |         prompt, repetition: num_given keys
    seen_GSD = torch.cat([k_GSD[:, :num_sinks], k_GSD[:, part], k_GSD[:, text_tokens:]], 1)
    places_Q = torch.arange(num_given, device=k_GSD.device)
    keys_K = torch.arange(part.start, part.stop, device=k_GSD.device)
    best_GK = torch.zeros(len(k_GSD), len(keys_K), device=k_GSD.device)
    lengths_HK = None
    if gradient_LQ is not None:
        module = masked_layers(inputs.model)[layer].self_attn
        lengths_HK = value_lengths(v_GKD, module.o_proj, num_heads)
    size = max(LEAST_ROWS, inputs.chunk_elements // (num_heads * seen_GSD.shape[1]))
    for places_C in places_Q.split(size):
        scores_HCS = row_scores(q_HQD[:, places_C], seen_GSD, scaling)
        future_CQ = places_Q > places_C[:, None]
        scores_HCS[..., -num_given:].masked_fill_(future_CQ, float("-inf"))
        weights_HCK = scores_HCS.softmax(-1)[..., num_sinks : num_sinks + len(keys_K)]
        if settings.beyond_window:
            lags_CK = text_tokens + places_C[:, None] - keys_K
            weights_HCK = weights_HCK * (lags_CK >= inputs.window_tokens)
        if gradient_LQ is not None and lengths_HK is not None:
            weights_HCK = weights_HCK * lengths_HK[:, None] * gradient_LQ[layer, places_C, None]
        weights_GRCK = weights_HCK.unflatten(0, (len(k_GSD), -1))
        best_GK = torch.maximum(best_GK, weights_GRCK.amax((1, 2)))
    scores.append(best_GK.cpu())
    return out


def masked_layers(model: Any) -> list[Any]:
    """Those that are a mask's."""
    return [model.base_model.layers[number] for number in full_layers(model.config)]


def value_lengths(v_GKD: Tensor, o_proj: nn.Linear, num_heads: int) -> Tensor:
    """(H, K): the length of v W_O, what a value adds to the residual stream in each query head.
    From W_O W_O^T of each head, because v W_O of all of them would be H times the hidden states."""
    exact = torch.promote_types(v_GKD.dtype, torch.float32)
    w_HDE = o_proj.weight.detach().to(exact).T.unflatten(0, (num_heads, -1))
    gram_GRDD = (w_HDE @ w_HDE.mT).unflatten(0, (len(v_GKD), -1))
    v_G1KD = v_GKD.to(exact)[:, None]
    return ((v_G1KD @ gram_GRDD) * v_G1KD).sum(-1).clamp_min(0).sqrt().flatten(0, 1)


def gradient_lengths(
    model: PreTrainedModel, cache: TextCache, given_Q: Tensor, prompt_tokens: int
) -> Tensor:
    """(L, Q): the length of the gradient at the output of each layer's attention, of the summed
    cross-entropy of the tokens after the prompt."""
    lengths: dict[int, Tensor] = {}

    def watch(layer: int, module: nn.Module, given: object, out_BQE: Tensor) -> None:
        def keep(gradient_BQE: Tensor) -> None:
            lengths[layer] = gradient_BQE[0].norm(dim=-1, dtype=exact)

        # When the layer is computed again this is called once more, to no effect: gradients flow
        # through the tensors of the first call.
        out_BQE.register_hook(keep)

    layers = masked_layers(model)
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(partial(watch, number))
        for number, layer in enumerate(layers)
    ]
    exact = torch.promote_types(model.dtype, torch.float32)
    try:
        with computing_again(model), torch.enable_grad():
            with torch.no_grad():
                embeddings_BQE = model.get_input_embeddings()(given_Q[None])
            hidden_BQE = model.base_model(
                inputs_embeds=embeddings_BQE.requires_grad_(), **{CACHE: cache}
            ).last_hidden_state
            # The gradient at the last hidden states, a few rows of logits at a time.
            gradient_QE = torch.zeros_like(hidden_BQE[0])
            for start in range(max(0, prompt_tokens - 1), len(given_Q) - 1, HEAD_ROWS):
                rows = slice(start, min(start + HEAD_ROWS, len(given_Q) - 1))
                last_CE = hidden_BQE[0, rows].detach().requires_grad_()
                next_C = given_Q[start + 1 : rows.stop + 1]
                logits_CV = logits_of(model, last_CE).to(exact)
                loss = F.cross_entropy(logits_CV, next_C, reduction="sum")
                gradient_QE[rows] = torch.autograd.grad(loss, last_CE)[0]
            torch.autograd.grad(hidden_BQE, embeddings_BQE, gradient_QE[None])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([lengths[layer] for layer in range(len(layers))])
