"""One parser a format, on snippets of what the compilers write."""

from __future__ import annotations

import pytest

from rmsnorm_ops.inspect import gcn, ptx, ptxas, ttgir
from rmsnorm_ops.inspect.machine import Accesses, Resources

PTX = """\
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
)
{
	ld.param.b64 	%rd9, [kernel_param_0];
	@%p14 ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd5 + 0 ];
	@!%p1 ld.global.L1::evict_first.v2.b64 { %rd4, %rd5 }, [ %rd6 + 0 ];
	ld.global.nc.v8.b32 { %r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8 }, [ %rd6 + 0 ];
	ld.global.b16 { %rs1 }, [ %rd8 + 0 ];
	cp.async.cg.shared.global [ %r120 + 0 ], [ %rd20 + 0 ], 0x10, %r122;
	cp.async.ca.shared.global [ %r120 + 0 ], [ %rd20 + 0 ], 0x4, %r122;
	cp.async.commit_group;
	cp.async.wait_group 0x2;
	bar.sync 	0;
	barrier.cta.sync.aligned.all 	0;
	shfl.sync.bfly.b32 	%r66, %r65, 16, 31, -1;
	ld.shared.v4.b32 	{%r1, %r2, %r3, %r4}, [%r5];
	rsqrt.approx.ftz.f32 	%r79, %r78;
	sqrt.approx.ftz.f32 	%r80, %r78; // not rsqrt
	div.full.f32 	%r81, %r80, %r79;
	div.s64 	%rd81, %rd80, %rd79;
	@%p1 st.global.v4.b32 [ %rd9 + 0 ], { %r1, %r2, %r3, %r4 };
	@%p1 st.global.b32 [ %rd9 + 0 ], { %r1 };
	// st.global.b32 in a comment
	ret;
}
"""


def test_ptx() -> None:
    found = ptx.instructions(PTX)
    assert found.loads.by_width == {2: 1, 4: 1, 16: 3, 32: 1}
    assert found.stores.by_width == {4: 1, 16: 1}
    assert (found.shuffles, found.barriers, found.rsqrts, found.divides, found.roots) == (1, 2, 1, 1, 1)
    assert ptx.architecture(PTX) == "sm_90a"


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'resident_backward' for 'sm_90a'
ptxas info    : Function properties for resident_backward
    208 bytes stack frame, 224 bytes spill stores, 236 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 208 bytes cumulative stack size
ptxas info    : Compile time = 37.000 ms
"""


def test_ptxas() -> None:
    assert ptxas.resources(PTXAS) == Resources(registers=128, accumulation=0, spilled=224, scratch=208)
    with pytest.raises(ValueError, match="did not report"):
        ptxas.resources("ptxas fatal")


METADATA = """\
; Occupancy: 1
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     7
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
    .private_segment_fixed_size: 16
    .sgpr_count:     71
    .sgpr_spill_count: 2
    .vgpr_count:     263
    .vgpr_spill_count: 3
    .wavefront_size: 64
...
	.end_amdgpu_metadata
"""
CDNA = """\
kernel:                                 ; @kernel
; %bb.0:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	buffer_load_dwordx4 v[2:5], v1, s[8:11], 0 offen
	global_load_dwordx2 v[2:3], v[0:1], off
	buffer_load_dwordx4 v1, s[8:11], 0 offen lds
	global_load_lds_dwordx4 v[0:1], off
	global_load_short_d16_hi v2, v[0:1], off
	global_load_ushort v2, v[0:1], off
	buffer_load_dword v2, v1, s[8:11], 0 offen
	global_load_ubyte v2, v[0:1], off
	v_add_f32_dpp v28, v28, v28 row_shr:8 row_mask:0xf bank_mask:0xf bound_ctrl:1
	v_mov_b32_dpp v29, v29 row_bcast:15 row_mask:0xa bank_mask:0xf bound_ctrl:1
	ds_bpermute_b32 v2, v3, v4
	ds_swizzle_b32 v2, v3 offset:swizzle(BITMASK_PERM,"ppppp")
	ds_read_b128 v[2:5], v1
	v_readlane_b32 s0, v1, 63
	s_barrier
	v_rsq_f32_e32 v1, v2
	v_rcp_iflag_f32_e32 v1, v2
	v_div_fixup_f32 v1, v2, v3, v4
	v_sqrt_f32_e32 v1, v2
	buffer_store_dwordx4 v[2:5], v1, s[8:11], 0 offen
	global_store_short v[0:1], v2, off
	scratch_store_dword off, v1, s32
"""
RDNA = """\
	buffer_load_b128 v[2:5], v1, s[8:11], 0 offen
	global_load_b64 v[2:3], v[0:1], off
	global_load_d16_hi_b16 v2, v[0:1], off
	global_load_u16 v2, v[0:1], off
	global_load_d16_u8 v2, v[0:1], off
	buffer_gl0_inv
	global_inv scope:SCOPE_SE
	v_permlanex16_b32 v54, v53, -1, -1 op_sel:[1,0]
	s_barrier_signal -1
	s_barrier_wait -1
	v_s_rsq_f32 s1, s2
	v_s_sqrt_f32 s1, s2
	buffer_store_b128 v[2:5], v1, s[8:11], 0 offen
	global_store_b16 v[0:1], v2, off
	scratch_load_b32 v1, off, s32
"""


def test_gcn_of_cdna() -> None:
    found = gcn.instructions(CDNA)
    assert found.loads.by_width == {1: 1, 2: 2, 4: 1, 8: 1, 16: 3}
    assert found.stores.by_width == {2: 1, 16: 1}
    assert (found.shuffles, found.barriers, found.rsqrts, found.divides, found.roots) == (4, 1, 1, 1, 1)


def test_gcn_of_rdna() -> None:
    found = gcn.instructions(RDNA)
    assert found.loads.by_width == {1: 1, 2: 2, 8: 1, 16: 1}
    assert found.stores.by_width == {2: 1, 16: 1}
    assert (found.shuffles, found.barriers, found.rsqrts, found.divides, found.roots) == (1, 1, 1, 0, 1)


def test_an_access_of_unknown_width_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="global_load_tr_x"):
        gcn.instructions("\tglobal_load_tr_x v1, v2, off\n")


def test_metadata_of_a_code_object() -> None:
    assert gcn.resources(METADATA) == Resources(registers=263, accumulation=7, spilled=12, scratch=16)
    without = "\n".join(line for line in METADATA.splitlines() if "agpr" not in line)
    assert gcn.resources(without).accumulation == 0, "RDNA has none"
    assert gcn.occupancy(METADATA) == 1
    for read in (gcn.resources, gcn.occupancy):
        with pytest.raises(ValueError, match="without"):
            read("")


TTGIR = """\
#blocked = #ttg.blocked<{sizePerThread = [1, 8], order = [1, 0]}>
#loc12 = loc("kernel.py":1:2)
tt.func public @kernel() {
  scf.for %start = %a to %b step %c  : i64 {
    %mean = "tt.reduce"(%squares) <{axis = 1 : i32}> ({
    ^bb0(%x: f32, %y: f32):
      %s = arith.addf %x, %y : f32
    }) : (tensor<2x4096xf32, #blocked>) -> tensor<2xf32, #ttg.slice<{dim = 1, parent = #blocked}>>
    %estimate = math.rsqrt %mean : f32
    %r:2 = scf.if %rescue -> (f32, f32) {
      %root = math.sqrt %eps : f32
      %estimate_2 = math.rsqrt %mean : f32
      scf.yield %root, %estimate_2 : f32, f32
    } else {
      scf.yield %a, %b : f32, f32
    }
    %q = arith.divf %a, %b : f32
  }
  %last = math.rsqrt %mean : f32
  %narrow = arith.mulf %h, %h : tensor<2x4096xbf16, #blocked>
  %wide = arith.extf %h : tensor<2x4096xbf16, #blocked> to tensor<2x4096xf32, #blocked>
}
"""


def test_ttgir() -> None:
    assert ttgir.ordinary(TTGIR) == ttgir.Ordinary(rsqrts=1, slow=("arith.divf",)), "one a tile, the last tile's set apart"
    assert ttgir.narrow_arithmetic(TTGIR) == ["= arith.mulf %h, %h : tensor<2x4096xbf16"]
    assert ttgir.reduction_layouts(TTGIR) == ["tensor<2x4096xf32, #ttg.blocked<{sizePerThread = [1, 8], order = [1, 0]}>>"]


def test_branches_are_found() -> None:
    text = "a {\n  b\n  x = scf.if c -> (f32) {\n    d\n  } else {\n    e {\n    }\n  }\n  f\n  scf.if c {\n    g\n  }\n  h\n}"
    assert [line.strip() for line in ttgir.without(text, "scf.if").splitlines()] == ["a {", "b", "f", "h", "}"]


def test_a_kernel_without_a_loop_counts_what_stands_there() -> None:
    assert ttgir.ordinary("%e = math.rsqrt %mean : f32\n%f = math.rsqrt %mean : f32").rsqrts == 2
    assert ttgir.ordinary("scf.for %i = %a to %b {\n%x = arith.addf %y, %z\n}\n%e = math.rsqrt %mean : f32").rsqrts == 1


def test_shares_are_of_bytes() -> None:
    found = Accesses.of([16, 16, 16, 2])
    assert (found.count, found.bytes, found.narrow, found.wide_share) == (4, 50, 1, 0.96)
    assert Accesses.of([32]).wide_share == 1
    assert Accesses.of([]).wide_share == 1
