"""Networks with exits, one file per architecture, and functions that attach exits to other networks."""

from anytime.models.attach.exits import AttachedExits, attach_exits
from anytime.models.attach.heads import PooledHead
from anytime.models.base import Carry, ExitModel, MultiExit, StagedModel, is_staged
from anytime.models.cost import Cost, measure_cost
from anytime.models.dvit import DViT, DViTConfig
from anytime.models.ensemble import AveragedEnsemble, Ensemble, average_logits
from anytime.models.features import collect_features, exit_features, last_layers
from anytime.models.imta import IMTA, IMTAConfig
from anytime.models.mlp import MLP, IntervalMLP, MLPConfig
from anytime.models.msdnet import MSDNet, MSDNetConfig
from anytime.models.outputs import OutputsModel, from_outputs
from anytime.models.resnet import CifarResNet, ResNet, ResNetConfig
from anytime.models.stage_list import StageList
from anytime.models.text.encoder import EncoderConfig, EncoderExits
from anytime.models.text.pretrained import Pretrained, load_minilm, load_pretrained, take_encoder
from anytime.models.trees.exits import TreeExits
from anytime.models.zoo import create, load, load_weights, names, save
from anytime.models.ztw import CascadeHead, attach_cascade

__all__ = [
    "IMTA",
    "MLP",
    "AttachedExits",
    "AveragedEnsemble",
    "Carry",
    "CascadeHead",
    "CifarResNet",
    "Cost",
    "DViT",
    "DViTConfig",
    "EncoderConfig",
    "EncoderExits",
    "Ensemble",
    "ExitModel",
    "IMTAConfig",
    "IntervalMLP",
    "MLPConfig",
    "MSDNet",
    "MSDNetConfig",
    "MultiExit",
    "OutputsModel",
    "PooledHead",
    "Pretrained",
    "ResNet",
    "ResNetConfig",
    "StageList",
    "StagedModel",
    "TreeExits",
    "attach_cascade",
    "attach_exits",
    "average_logits",
    "collect_features",
    "create",
    "exit_features",
    "from_outputs",
    "is_staged",
    "last_layers",
    "load",
    "load_minilm",
    "load_pretrained",
    "load_weights",
    "measure_cost",
    "names",
    "save",
    "take_encoder",
]
