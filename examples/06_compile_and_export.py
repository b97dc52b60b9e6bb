"""torch.compile, torch.export and AOTInductor: one graph for any number of rows, saved, packaged and run without Python."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rmsnorm_ops

HIDDEN, WIDE = 64, 128


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6), rmsnorm_ops.RMSNorm(HIDDEN, 1e-6)
        self.up, self.down = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.silu(self.up(self.norm(x))))
        return rmsnorm_ops.add_rms_norm(y, x, self.last.weight, 1e-6).y


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = MLP().to(device)
    inputs = [torch.randn(rows, HIDDEN, device=device) for rows in (4, 7, 33)]

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for x in inputs:
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
    compiled(inputs[0]).sum().backward()
    print("compiled: forward and backward, any number of rows")

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        rows = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
        program = torch.export.export(model, (inputs[0],), dynamic_shapes=rows)
        print("exported:", *(str(node.target) for node in program.graph.nodes if "rmsnorm" in str(node.target)))

        torch.export.save(program, Path(folder, "mlp.pt2"))
        loaded = torch.export.load(Path(folder, "mlp.pt2")).module()  # needs `import rmsnorm_ops`, for the operators' schemas
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder, "packaged.pt2")))
        packaged = torch._inductor.aoti_load_package(package)
        for x in inputs:
            assert torch.equal(loaded(x), model(x))
            torch.testing.assert_close(packaged(x), model(x), rtol=1e-3, atol=1e-4)
        print("saved, loaded, packaged and run at", *(len(x) for x in inputs), "rows")

    # ONNX and other consumers that know torch's operators alone take the program after
    # program.run_decompositions({**torch.export.default_decompositions(), **rmsnorm_ops.decompositions()}).


if __name__ == "__main__":
    main()
