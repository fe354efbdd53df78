"""Bytes and operations of kernels, in small programs that are written by hand."""

import pytest

from train.planning.traffic import ATTENTION, COPIES, PRODUCTS, kernels_of, kernels_written_in

FUSIONS = """
%slice_of_stack (p0: bf16[6,4,8], p1: s32[]) -> bf16[4,8] {
  %p0 = bf16[6,4,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %taken = bf16[1,4,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,4,8}
  %flat = bf16[4,8]{1,0} bitcast(%taken)
  ROOT %out = bf16[4,8]{1,0} negate(%flat)
}

%put_into_stack (q0: bf16[6,4,8], q1: bf16[4,8], q2: s32[]) -> bf16[6,4,8] {
  %q0 = bf16[6,4,8]{2,1,0} parameter(0)
  %q1 = bf16[4,8]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  %one = bf16[1,4,8]{2,1,0} bitcast(%q1)
  ROOT %put = bf16[6,4,8]{2,1,0} dynamic-update-slice(%q0, %one, %q2, %none, %none)
}

%product (l: bf16[4,8], r: bf16[8,5]) -> f32[4,5] {
  %l = bf16[4,8]{1,0} parameter(0)
  %r = bf16[8,5]{1,0} parameter(1)
  ROOT %dot = f32[4,5]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
STEP = f"""HloModule step
{FUSIONS}
%body (state: (s32[], bf16[6,4,8], bf16[6,4,8])) -> (s32[], bf16[6,4,8], bf16[6,4,8]) {{
  %state = (s32[], bf16[6,4,8]{{2,1,0}}, bf16[6,4,8]{{2,1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %from = bf16[6,4,8]{{2,1,0}} get-tuple-element(%state), index=1
  %into = bf16[6,4,8]{{2,1,0}} get-tuple-element(%state), index=2
  %x = bf16[4,8]{{1,0}} fusion(%from, %i), kind=kLoop, calls=%slice_of_stack, \
metadata={{op_name="jit(step)/jvp()/actjax.rms_norm/neg"}}
  %call = bf16[4,8]{{1,0}} custom-call(%from, %x), custom_call_target="kernel", metadata=\
{{op_name="jit(step)/transpose(jvp())/actjax.norm_linear/actjax_quantize/triton_kernel_call"}}
  %put = bf16[6,4,8]{{2,1,0}} fusion(%into, %call, %i), kind=kLoop, calls=%put_into_stack
  ROOT %next = (s32[], bf16[6,4,8]{{2,1,0}}, bf16[6,4,8]{{2,1,0}}) tuple(%i, %from, %put)
}}

ENTRY %main (a: bf16[4,8], b: bf16[8,5], s: (s32[], bf16[6,4,8], bf16[6,4,8])) -> f32[4,5] {{
  %a = bf16[4,8]{{1,0}} parameter(0)
  %b = bf16[8,5]{{1,0}} parameter(1)
  %s = (s32[], bf16[6,4,8]{{2,1,0}}, bf16[6,4,8]{{2,1,0}}) parameter(2)
  %loop = (s32[], bf16[6,4,8]{{2,1,0}}, bf16[6,4,8]{{2,1,0}}) while(%s), condition=%c, body=%body, \
backend_config={{"known_trip_count":{{"n":"6"}}}}
  %cublas = (f32[4,8]{{1,0}}, s8[64]{{0}}) custom-call(%a, %a), \
custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":\
{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}
  ROOT %out = f32[4,5]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%product, \
backend_config={{"fusion_backend_config":{{"kind":"__triton_gemm"}}}}
}}
"""
ATTENTIVE = """HloModule attention

ENTRY %main (q: bf16[2,16,3,8]) -> bf16[2,16,3,8] {
  %q = bf16[2,16,3,8]{3,2,1,0} parameter(0)
  %kept = (bf16[2,3,16,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["2", "3", "16", "16"]}, "mask_type": "CAUSAL"}
  ROOT %back = (bf16[2,3,16,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["2", "3", "16", "16"]}, "mask_type": "NO_MASK"}
}
"""
LAYER = 4 * 8 * 2
"""Bytes of an entry of a stack."""


@pytest.fixture(scope="module")
def kernels():
    return {kernel.name: kernel for kernel in kernels_of(STEP)}


def test_kernels_of_a_loop_run_as_often_as_it(kernels):
    assert list(kernels) == ["x", "call", "put", "cublas", "out"]
    assert [kernel.runs for kernel in kernels.values()] == [6, 6, 6, 1, 1]


def test_a_kernel_that_slices_a_stack_reads_one_entry(kernels):
    # The index counts with 4 bytes.
    assert kernels["x"].moved == 6 * (2 * LAYER + 4)


def test_a_kernel_that_updates_a_stack_in_place_writes_one_entry(kernels):
    assert kernels["put"].moved == 6 * (2 * LAYER + 4)
    assert kernels["put"].operator == COPIES


def test_a_call_on_a_stack_reads_one_entry(kernels):
    assert kernels["call"].moved == 6 * 3 * LAYER


def test_kernels_are_named_by_operator_and_pass(kernels):
    assert [(k.operator, k.phase) for k in kernels.values()] == [
        ("rms_norm", "forward"),
        ("actjax_quantize", "backward"),
        (COPIES, "update"),
        (PRODUCTS, "update"),
        (PRODUCTS, "update"),
    ]


def test_products_count_their_operations_and_tell_whether_rows_are_aligned(kernels):
    assert kernels["cublas"].flops == 2 * 4 * 8 * 8
    assert kernels["out"].flops == 2 * 4 * 8 * 5
    assert kernels["cublas"].is_aligned
    assert not kernels["out"].is_aligned  # Rows of 5 numbers.
    assert kernels["x"].flops == 0


def test_attention_counts_two_products_and_five_backward():
    forward, backward = kernels_of(ATTENTIVE)
    product = 2 * (2 * 3 * 16 * 16) * 8
    assert forward.operator == backward.operator == ATTENTION
    assert forward.flops == 2 * product / 2  # Half of the scores are masked.
    assert backward.flops == 5 * product


def test_an_update_of_what_the_kernel_computes_writes_all_of_it():
    fused = """%fused (p: bf16[4,8], z: bf16[4,1]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %z = bf16[4,1]{1,0} parameter(1)
  %no = s32[] constant(0)
  %n = bf16[4,8]{1,0} negate(%p)
  ROOT %u = bf16[4,8]{1,0} dynamic-update-slice(%n, %z, %no, %no)
}

ENTRY %main (a: bf16[4,8], b: bf16[4,1]) -> bf16[4,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[4,1]{1,0} parameter(1)
  ROOT %k = bf16[4,8]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused
}
"""
    (kernel,) = kernels_of(fused)
    assert kernel.moved == 2 * LAYER + 4 * 2


def test_the_languages_of_kernels_are_found():
    call = (
        '  %{0} = u8[4] custom-call(), custom_call_target="{1}", metadata={{op_name="jit/{2}/x"}}\n'
    )
    lines = [
        call.format("a", "tpu_custom_call", "actjax_quantize"),
        call.format("b", "triton_kernel_call", "actjax_quantize"),
        call.format("c", "tpu_custom_call", "another"),
        call.format("d", "__cublas$gemm", "dot"),
    ]
    assert kernels_written_in("".join(lines)) == ["Triton", "Mosaic"]
    assert kernels_written_in("".join(lines[1:])) == ["Triton"]
    both = [*lines[1:], call.format("e", "triton_kernel_call_ffi", "actjax_quantize")]
    assert kernels_written_in("".join(both)) == kernels_written_in(both[-1]) == ["Triton"]
    assert kernels_written_in("".join(lines[2:])) == []


def test_a_product_that_reads_a_layer_of_a_stack_is_a_product():
    # As XLA of JAX 0.12 writes it: no copy of the layer exists.
    text = """%sliced (p0: bf16[6,8,5], p1: s32[], p2: bf16[4,8]) -> (bf16[4,5], s8[64]) {
  %p0 = bf16[6,8,5]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[4,8]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %taken = bf16[1,8,5]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,5}
  %flat = bf16[8,5]{1,0} bitcast(%taken)
  ROOT %call = (bf16[4,5]{1,0}, s8[64]{0}) custom-call(%p2, %flat), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit/jvp(actjax.linear)/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}

ENTRY %main (w: bf16[6,8,5], i: s32[], x: bf16[4,8]) -> (bf16[4,5], s8[64]) {
  %w = bf16[6,8,5]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[4,8]{1,0} parameter(2)
  ROOT %k = (bf16[4,5]{1,0}, s8[64]{0}) fusion(%w, %i, %x), kind=kCustom, calls=%sliced
}
"""
    (kernel,) = kernels_of(text)
    assert (kernel.operator, kernel.phase) == (PRODUCTS, "forward")
    assert kernel.flops == 2 * 4 * 8 * 5
    assert not kernel.is_aligned
    assert kernel.moved == 2 * (8 * 5 + 4 * 8 + 4 * 5) + 64 + 4


def test_a_call_that_is_fused_with_a_slice_writes_one_entry_of_a_stack():
    # As XLA of JAX 0.12 writes it, if the call also reads a slice of another stack.
    text = """%sliced (p0: bf16[6,8], p1: s32[], p2: bf16[4,8], p3: u8[6,4,8]) -> (bf16[4,8]) {
  %p0 = bf16[6,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[4,8]{1,0} parameter(2)
  %p3 = u8[6,4,8]{2,1,0} parameter(3)
  %zero = s32[] constant(0)
  %taken = bf16[1,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,8}
  ROOT %call = (bf16[4,8]{1,0}, u8[6,4,8]{2,1,0}) custom-call(%p2, %taken, %p3), \
custom_call_target="triton_kernel_call_ffi", output_to_operand_aliasing={{1}: (2, {})}, \
metadata={op_name="jit/jvp(actjax.norm_linear)/actjax_rms_norm_encode/triton_kernel_call"}
}
"""
    fusion = "(bf16[4,8]{1,0}, u8[6,4,8]{2,1,0}) fusion(%from, %i, %x, %into), calls=%sliced"
    step = text + STEP.split("HloModule step")[1].replace(
        "custom-call(%from, %x), custom_call_target", f"custom-call(%x)\n  %k = {fusion}, old"
    )
    (kernel,) = [k for k in kernels_of(step) if k.name == "k"]
    assert kernel.operator == "actjax_rms_norm_encode"
    # The input, its scale, the value and the codes.
    assert kernel.moved == 6 * (4 * 8 * 2 + 8 * 2 + 4 * 8 * 2 + 4 * 8)


def test_a_fusion_that_runs_beside_others_counts_once():
    start = STEP.replace(
        "%x = bf16[4,8]{1,0} fusion(",
        "%s = ((bf16[6,4,8]{2,1,0}, s32[]), bf16[4,8]{1,0}, u32[]) fusion-start(",
    ).replace("%call = ", "%x = bf16[4,8]{1,0} fusion-done(%s)\n  %call = ")
    (kernel,) = [k for k in kernels_of(start) if k.name == "s"]
    assert (kernel.moved, kernel.operator) == (6 * (2 * LAYER + 4), "rms_norm")
    assert sum(k.moved for k in kernels_of(start)) == sum(k.moved for k in kernels_of(STEP))
