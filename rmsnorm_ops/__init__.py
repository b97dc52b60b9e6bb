"""RMSNorm for PyTorch as registered operators: ``torch.ops.rmsnorm.*``. See docs/index.md."""

from rmsnorm_ops.ahead import warmup
from rmsnorm_ops.decompose import decompositions
from rmsnorm_ops.functional import AddRMSNormResult, add_rms_norm, rms_norm
from rmsnorm_ops.functional_quant import AddRMSNormQuantResult, RMSNormQuantResult, add_rms_norm_quant, rms_norm_quant
from rmsnorm_ops.module import RMSNorm
from rmsnorm_ops.replace import Replacement, replace_rms_norm
from rmsnorm_ops.version import __version__

__all__ = [
    "AddRMSNormQuantResult",
    "AddRMSNormResult",
    "RMSNorm",
    "RMSNormQuantResult",
    "Replacement",
    "__version__",
    "add_rms_norm",
    "add_rms_norm_quant",
    "decompositions",
    "replace_rms_norm",
    "rms_norm",
    "rms_norm_quant",
    "warmup",
]
