"""Each group windowed alone: how much the mean log-probability of the answers drops.

    s(l, g) = mean over questions of  log p(answer | all full) - log p(answer | only l, g windowed)

where the log-probability of an answer is the mean over its tokens. This black-box ranking uses no
attention weights. Each haystack runs once in the dense model and once for each group, from its
layer on. A large drop is global; a negative one means that the window helps."""
# L layers, G groups a layer

import torch

from bosch.calibration import Calibration, Haystack
from bosch.method import Inputs, MethodTraits, NoSettings, Scores
from bosch.methods._examples import Result, measure_haystacks
from bosch.methods._statistics import add_up
from bosch.run.dist import Ranks
from bosch.search.score import Evaluator
from bosch.search.settings import SearchSettings

traits = MethodTraits(measures=True)
Settings = NoSettings


def count_passes(settings: NoSettings, num_layers: int, num_groups: int) -> float:
    """About how often the model reads the calibration set: for the time said beforehand."""
    return 1 + num_groups * (num_layers + 1) / 2  # the dense model; each group from its layer on


def score_groups(inputs: Inputs) -> Scores:
    shape = inputs.num_layers, inputs.num_groups

    def measure(haystack: Haystack) -> Result:
        z = [[1] * shape[1] for _ in range(shape[0])]
        # As many teams as ranks: each rank scores this one haystack by itself.
        one = Calibration([haystack])
        settings = SearchSettings(masks_at_once=Ranks.current().world)
        evaluator = Evaluator(inputs.model, one, inputs.window_tokens, settings)

        def log_probability() -> float:
            """The mean over each answer's tokens, summed over the questions."""
            answers = evaluator.answers(tuple(map(tuple, z)), 0)
            pairs = zip(answers, haystack.questions, strict=True)
            return sum(one.log_probability / len(question.answer) for one, question in pairs)

        dense = log_probability()
        drops_LG = torch.zeros(shape, dtype=torch.float64)
        # From the top, so that each mask shares all layers below with the one before it: their
        # states are cached, and a probe of layer l computes L - l layers.
        for layer in reversed(range(shape[0])):
            for group in range(shape[1]):
                z[layer][group] = 0
                drops_LG[layer, group] = dense - log_probability()
                z[layer][group] = 1
        return {"drops": drops_LG.tolist()}

    results = measure_haystacks(inputs, "single_group", measure)
    drops_LG = add_up(results, "drops") / inputs.calibration.num_questions
    return Scores(tuple(map(tuple, drops_LG.tolist())), "global")
