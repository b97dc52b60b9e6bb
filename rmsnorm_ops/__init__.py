"""RMSNorm for PyTorch as registered operators: ``torch.ops.rmsnorm.*``. See docs/index.md."""

from rmsnorm_ops.decompose import decompositions
from rmsnorm_ops.functional import AddRMSNormResult, add_rms_norm, rms_norm
from rmsnorm_ops.module import RMSNorm
from rmsnorm_ops.replace import Replacement, replace_rms_norm
from rmsnorm_ops.version import __version__

__all__ = [
    "AddRMSNormResult",
    "RMSNorm",
    "Replacement",
    "__version__",
    "add_rms_norm",
    "decompositions",
    "replace_rms_norm",
    "rms_norm",
]
