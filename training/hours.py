"""How many tokens can be trained on in a number of hours here: the option --hours."""

import math
from dataclasses import replace
from pathlib import Path

from bosch.config import Config, fill_in
from bosch.methods._settings import learning_tokens
from bosch.model_files import read_json_object
from bosch.run.dist import Ranks, rank_and_world
from bosch.training import rehearsal
from bosch.training.fitting import make_plan
from bosch.training.parallel import start_world
from bosch.training.train_stage import schedule_of

# What is chosen from, meant for small models; never less than one step, which alone has 2.1M tokens
# in the paper's settings.
FEWEST_TOKENS, MOST_TOKENS = 300_000, 30_000_000
TRAINING_SHARE = 0.6  # of the hours; search and evaluations get the rest


def with_hours(config: Config, hours: float, record: Path) -> tuple[Config, list[str]]:
    """The config with as many tokens, in whole steps, as fit into the hours here, and lines on it;
    of a run that has begun, with those that fitted then (`record`: its run.json). Rank 0 measures:
    another would come to another number."""
    if rank_and_world()[1] > 1:
        start_world()
    tokens, lines = Ranks.current().from_rank_0(lambda: _fit_tokens(config, hours, record))
    return replace(config, data=replace(config.data, tokens=tokens)), lines


def _fit_tokens(config: Config, hours: float, record: Path) -> tuple[int, list[str]]:
    if record.is_file():
        stored = fill_in(read_json_object(record).get("config") or {})
        return stored["data"]["tokens"], []
    step_tokens = config.train.batch_sequences * config.data.sequence_length
    fewest = math.ceil(FEWEST_TOKENS / step_tokens)  # steps
    # A learned mask takes its share of the tokens first, so more of them may have to be had until
    # one step is left. If no number is enough, as with token_share=1, the schedule refuses it.
    for steps in range(fewest, fewest + 100):
        tokens = steps * step_tokens
        one = replace(config, data=replace(config.data, tokens=tokens))
        if tokens - learning_tokens(one) >= step_tokens:
            fewest = steps
            break
    most = max(MOST_TOKENS // step_tokens, fewest)
    one = replace(config, data=replace(config.data, tokens=fewest * step_tokens))
    # All of its steps are measured; what ends a training early is checked with the tokens chosen.
    whole = replace(one, train=replace(one.train, until="budget", max_steps=None))
    plan = make_plan(one, num_gpus=rank_and_world()[1])
    seconds = rehearsal.training_seconds(plan, schedule_of(whole))
    fit = math.floor(TRAINING_SHARE * hours * 3600 / seconds * fewest)
    chosen = min(max(fit, fewest), most) * step_tokens
    line = f"--hours {hours:g}: {chosen:,} tokens"
    if fit < fewest:
        needed = seconds / TRAINING_SHARE / 3600
        line += f", the fewest that teach anything; they need about {needed:.1f} hours"
    elif fit > most:
        line += ", the most that --hours chooses; --data.tokens sets more"
    return chosen, [line]
