"""RMSNorm for PyTorch as registered operators: ``torch.ops.rmsnorm.*``. See docs/index.md."""

from rmsnorm_ops.functional import rms_norm
from rmsnorm_ops.version import __version__

__all__ = ["__version__", "rms_norm"]
