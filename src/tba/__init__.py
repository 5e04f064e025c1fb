"""Trajectory Balance with Asynchrony: asynchronous, off-policy RL post-training of language models.

The names that a recipe or a script usually needs are here: `import tba`, then `tba.Recipe`, `tba.HuggingFace`,
`tba.train`. Each name is loaded when it is first used, so that the import itself is light and loads no model library.
"""

import ast
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Whether there is a GPU is asked before parts are forked, and must not start CUDA: a fork could not use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    from tba.api import Run as Run
    from tba.api import check as check
    from tba.api import evaluate as evaluate
    from tba.api import load_recipe as load_recipe
    from tba.api import open_run as open_run
    from tba.api import train as train
    from tba.batch import collate as collate
    from tba.engines.transformers import EngineSettings as EngineSettings
    from tba.environments.hosts import EpisodeLimits as EpisodeLimits
    from tba.environments.task import EnvironmentTask as EnvironmentTask
    from tba.environments.verifiers_task import VerifiersTask as VerifiersTask
    from tba.errors import TbaError as TbaError
    from tba.errors import UserError as UserError
    from tba.evaluation.accuracy import EvaluationSettings as EvaluationSettings
    from tba.generation import generate as generate
    from tba.models.endpoint_teacher import EndpointTeacher as EndpointTeacher
    from tba.models.huggingface import HuggingFace as HuggingFace
    from tba.models.warm_start import Lesson as Lesson
    from tba.models.warm_start import WarmStart as WarmStart
    from tba.objectives.correction import Correction as Correction
    from tba.objectives.grpo import Grpo as Grpo
    from tba.objectives.grpo import dr_grpo as dr_grpo
    from tba.objectives.online_dpo import OnlineDpo as OnlineDpo
    from tba.objectives.policy_gradient import Reinforce as Reinforce
    from tba.objectives.policy_gradient import proximal_rloo as proximal_rloo
    from tba.objectives.ppo import Ppo as Ppo
    from tba.objectives.raft import Raft as Raft
    from tba.objectives.tba_prime import TbaPrime as TbaPrime
    from tba.objectives.trajectory_balance import TrajectoryBalance as TrajectoryBalance
    from tba.policy.lora import LoraSettings as LoraSettings
    from tba.recipe import InitialFill as InitialFill
    from tba.recipe import Recipe as Recipe
    from tba.recipe import RuntimeSettings as RuntimeSettings
    from tba.record.recorder import RecordSettings as RecordSettings
    from tba.replay.buffer import BufferSettings as BufferSettings
    from tba.replay.pacing import Pacing as Pacing
    from tba.replay.replay import ReplaySettings as ReplaySettings
    from tba.replay.selection import RecencyReward as RecencyReward
    from tba.rewards.endpoint import Endpoint as Endpoint
    from tba.rewards.exact_answer import ExactAnswer as ExactAnswer
    from tba.rewards.functions import FunctionReward as FunctionReward
    from tba.rewards.functions import WeightedFunctions as WeightedFunctions
    from tba.rewards.judges import RankingJudge as RankingJudge
    from tba.rewards.judges import RubricJudge as RubricJudge
    from tba.rollout.exploration import Fixed as Fixed
    from tba.rollout.exploration import RandomPerRound as RandomPerRound
    from tba.rollout.prompts import PromptSettings as PromptSettings
    from tba.schedules import Constant as Constant
    from tba.schedules import Linear as Linear
    from tba.schedules import WarmupConstant as WarmupConstant
    from tba.schedules import WarmupCosine as WarmupCosine
    from tba.schedules import WarmupLinear as WarmupLinear
    from tba.schedules import WarmupStableDecay as WarmupStableDecay
    from tba.tasks.arithmetic import Arithmetic as Arithmetic
    from tba.tasks.jsonl import Jsonl as Jsonl
    from tba.training.optimizer import OptimizerSettings as OptimizerSettings
    from tba.training.supervised import SupervisedSettings as SupervisedSettings
    from tba.training.teacher import Teacher as Teacher
    from tba.training.tiny_models import ScratchModel as ScratchModel
    from tba.types import Completion as Completion
    from tba.types import Evaluation as Evaluation
    from tba.types import Group as Group
    from tba.types import Judgement as Judgement
    from tba.types import Problem as Problem
    from tba.types import Prompt as Prompt
    from tba.types import Sampling as Sampling
    from tba.types import Trajectory as Trajectory
    from tba.types import Version as Version

# of each name above the module that has it: a name stands once, where type checkers see it
_NODES = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
_MODULE_OF = {
    name.name: str(n.module) for n in _NODES if isinstance(n, ast.ImportFrom) for name in n.names if name.asname
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Returns a public name, from its module."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tba' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
