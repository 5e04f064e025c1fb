"""Trajectory Balance with Asynchrony: asynchronous, off-policy RL post-training of language models.

The names that a recipe or a script usually needs are here: `import tba`, then `tba.Recipe`, `tba.HuggingFace`,
`tba.train`. Each name is loaded when it is first used, so that the import itself is light and loads no model library.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Whether there is a GPU is asked before parts are forked, and must not start CUDA: a fork could not use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    from tba.api import Run as Run, check as check, evaluate as evaluate, load_recipe as load_recipe
    from tba.api import open_run as open_run, train as train
    from tba.batch import collate as collate
    from tba.engines.transformers import EngineSettings as EngineSettings
    from tba.environments.hosts import EpisodeLimits as EpisodeLimits
    from tba.environments.python_tool import PythonTool as PythonTool
    from tba.environments.task import EnvironmentTask as EnvironmentTask
    from tba.environments.verifiers_task import VerifiersTask as VerifiersTask
    from tba.errors import TbaError as TbaError, UserError as UserError
    from tba.evaluation.accuracy import EvaluationSettings as EvaluationSettings
    from tba.generation import generate as generate
    from tba.models.endpoint_teacher import EndpointTeacher as EndpointTeacher
    from tba.models.huggingface import HuggingFace as HuggingFace
    from tba.models.warm_start import Lesson as Lesson, WarmStart as WarmStart
    from tba.objectives.correction import Correction as Correction
    from tba.objectives.distil import Distil as Distil
    from tba.objectives.grpo import Grpo as Grpo, dr_grpo as dr_grpo
    from tba.objectives.online_dpo import OnlineDpo as OnlineDpo
    from tba.objectives.policy_gradient import Reinforce as Reinforce, proximal_rloo as proximal_rloo
    from tba.objectives.ppo import Ppo as Ppo
    from tba.objectives.raft import Raft as Raft
    from tba.objectives.tba_prime import TbaPrime as TbaPrime
    from tba.objectives.trajectory_balance import TrajectoryBalance as TrajectoryBalance
    from tba.policy.lora import LoraSettings as LoraSettings
    from tba.recipe import InitialFill as InitialFill, Recipe as Recipe, RuntimeSettings as RuntimeSettings
    from tba.record.recorder import RecordSettings as RecordSettings
    from tba.replay.buffer import BufferSettings as BufferSettings
    from tba.replay.pacing import Pacing as Pacing
    from tba.replay.replay import ReplaySettings as ReplaySettings
    from tba.replay.selection import RecencyReward as RecencyReward
    from tba.rewards.code_reward import CodeReward as CodeReward
    from tba.rewards.code_running import Language as Language
    from tba.rewards.endpoint import Endpoint as Endpoint
    from tba.rewards.exact_answer import ExactAnswer as ExactAnswer
    from tba.rewards.functions import FunctionReward as FunctionReward, WeightedFunctions as WeightedFunctions
    from tba.rewards.judges import RankingJudge as RankingJudge, RubricJudge as RubricJudge
    from tba.rollout.exploration import Fixed as Fixed, RandomPerRound as RandomPerRound
    from tba.rollout.prompts import PromptSettings as PromptSettings
    from tba.schedules import Constant as Constant, Linear as Linear, WarmupConstant as WarmupConstant
    from tba.schedules import WarmupCosine as WarmupCosine, WarmupLinear as WarmupLinear
    from tba.schedules import WarmupStableDecay as WarmupStableDecay
    from tba.tasks.arithmetic import Arithmetic as Arithmetic
    from tba.tasks.jsonl import Jsonl as Jsonl
    from tba.training.optimizer import OptimizerSettings as OptimizerSettings
    from tba.training.supervised import SupervisedSettings as SupervisedSettings
    from tba.training.teacher import Teacher as Teacher
    from tba.training.tiny_models import ScratchModel as ScratchModel
    from tba.types import Completion as Completion, Evaluation as Evaluation, Group as Group, Judgement as Judgement
    from tba.types import Problem as Problem, Prompt as Prompt, Sampling as Sampling, Trajectory as Trajectory
    from tba.types import Version as Version

_NAMES_BY_MODULE = {  # the public names again, without loading their modules
    "api": "Run check evaluate load_recipe open_run train", "batch": "collate",
    "engines.transformers": "EngineSettings", "generation": "generate",
    "environments.hosts": "EpisodeLimits", "environments.python_tool": "PythonTool",
    "environments.task": "EnvironmentTask", "environments.verifiers_task": "VerifiersTask",
    "errors": "TbaError UserError", "evaluation.accuracy": "EvaluationSettings",
    "models.endpoint_teacher": "EndpointTeacher",
    "models.huggingface": "HuggingFace", "models.warm_start": "Lesson WarmStart", "objectives.correction": "Correction",
    "objectives.distil": "Distil", "objectives.grpo": "Grpo dr_grpo", "objectives.online_dpo": "OnlineDpo",
    "objectives.policy_gradient": "Reinforce proximal_rloo", "objectives.ppo": "Ppo", "objectives.raft": "Raft",
    "objectives.tba_prime": "TbaPrime", "objectives.trajectory_balance": "TrajectoryBalance",
    "policy.lora": "LoraSettings", "recipe": "InitialFill Recipe RuntimeSettings", "record.recorder": "RecordSettings",
    "replay.buffer": "BufferSettings", "replay.pacing": "Pacing", "replay.replay": "ReplaySettings",
    "replay.selection": "RecencyReward", "rewards.code_reward": "CodeReward", "rewards.code_running": "Language",
    "rewards.endpoint": "Endpoint", "rewards.exact_answer": "ExactAnswer",
    "rewards.functions": "FunctionReward WeightedFunctions", "rewards.judges": "RankingJudge RubricJudge",
    "rollout.exploration": "Fixed RandomPerRound", "rollout.prompts": "PromptSettings",
    "schedules": "Constant Linear WarmupConstant WarmupCosine WarmupLinear WarmupStableDecay",
    "tasks.arithmetic": "Arithmetic", "tasks.jsonl": "Jsonl", "training.optimizer": "OptimizerSettings",
    "training.supervised": "SupervisedSettings", "training.teacher": "Teacher", "training.tiny_models": "ScratchModel",
    "types": "Completion Evaluation Group Judgement Problem Prompt Sampling Trajectory Version",
}  # fmt: skip
_MODULE_OF = {name: f"tba.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Returns what a public name stands for, from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tba' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
