"""Query-adaptive attention criterion (QAdA): attention mass in the window against an estimate of
the rest.

Equations 15 to 19 of the paper. Of row t, with mean m and covariance S of the B keys just before
its window, and the scale of the scores left out:

    local = sum over keys in the window of exp(q . k)
    far   = (t - W + 1) exp(q . m + q'Sq / 2)           keys before the window, as if Gaussian
    s     = mean over t of local / (local + far)

Mean and covariance matter only along the query, where they are the mean and variance of the scores
q . k: no covariance matrix is built, and only the band of window and buffer is computed for each
row. A row that sees no more than its window has all its mass inside."""
# H query heads, G kv heads, T tokens, C rows of a chunk, S keys, D head size

import torch
from torch import Tensor

from bosch.method import Inputs, MethodTraits, NoSettings, Scores
from bosch.methods._statistics import chunks, mean_over_rows, row_scores

traits = MethodTraits(measures=True)
Settings = NoSettings


def score_groups(inputs: Inputs) -> Scores:
    window_tokens = inputs.window_tokens
    # Keys before the window that give mean and variance. The paper calls them few, without a
    # number: 256 at its 1,024 are few, and still enough for a variance.
    buffer = max(1, window_tokens // 4)

    def local_shares(q_HTD: Tensor, k_GTD: Tensor, scaling: float) -> Tensor:
        num_heads, num_tokens, _ = q_HTD.shape
        sees_all = min(window_tokens, num_tokens)  # the first rows have a share of 1 each
        total_H = torch.full((num_heads,), sees_all, dtype=torch.float64, device=q_HTD.device)
        far_HTD = q_HTD[:, sees_all:]
        for start, stop in chunks(far_HTD, inputs.chunk_elements, window_tokens + buffer):
            share_HC = local_share(
                q_HTD, k_GTD, scaling, start + window_tokens, stop + window_tokens
            )
            total_H += share_HC.sum(-1, dtype=torch.float64)
        return total_H

    def local_share(q_HTD: Tensor, k_GTD: Tensor, scaling: float, start: int, stop: int) -> Tensor:
        """(H, C): the estimated share of mass in the window, for rows that see beyond it. The keys
        of sinks count as inside."""
        first = max(0, start - window_tokens - buffer + 1)
        scores_HCS = row_scores(q_HTD[:, start:stop], k_GTD[:, first:stop], scaling)
        queries_C1 = torch.arange(start, stop, device=q_HTD.device)[:, None]
        lags_CS = queries_C1 - torch.arange(first, stop, device=q_HTD.device)
        inside_CS = (lags_CS >= 0) & (lags_CS < window_tokens)
        local_HC = scores_HCS.masked_fill(~inside_CS, float("-inf")).logsumexp(-1)

        near_CS = (lags_CS >= window_tokens) & (lags_CS < window_tokens + buffer)
        near_CS &= torch.arange(first, stop, device=q_HTD.device) >= inputs.sink.num_visible
        num_near_C = near_CS.sum(-1).clamp_min(1)  # 0 where only sinks are left: none is far then
        mean_HC = (scores_HCS * near_CS).sum(-1) / num_near_C  # q . m
        deviation_HCS = (scores_HCS - mean_HC[..., None]) * near_CS
        variance_HC = deviation_HCS.square().sum(-1) / num_near_C  # q'Sq
        num_far_C = queries_C1[:, 0] - window_tokens + 1
        if num_sinks := inputs.sink.num_visible:
            sinks_HCN = row_scores(q_HTD[:, start:stop], k_GTD[:, :num_sinks], scaling)
            # Those still in the window are counted there.
            within_CN = torch.arange(num_sinks, device=q_HTD.device) >= num_far_C[:, None]
            sinks_HC = sinks_HCN.masked_fill(within_CN, float("-inf")).logsumexp(-1)
            local_HC = torch.logaddexp(local_HC, sinks_HC)
            num_far_C = (num_far_C - num_sinks).clamp_min(0)
        # In logarithms, as the exponentials overflow: local / (local + far) is the sigmoid of their
        # difference.
        far_HC = num_far_C.to(mean_HC.dtype).log() + mean_HC + variance_HC / 2
        return (local_HC - far_HC).sigmoid()

    share_LH = mean_over_rows(inputs, "qada", "shares", local_shares)
    return Scores.of_heads(share_LH, inputs.num_groups, "local")
