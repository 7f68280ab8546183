"""Every primitive of JAX 0.10 to 0.12 and of distjax, by the rule that the analysis has for it.

The rules that name primitives are the library's own (`distjax/_src/replica/analysis.py`); the rest
falls under what holds for any primitive, and stands here with the reason why that is enough.
"""

import dataclasses

from distjax._src import jaxprs
from distjax._src.replica import analysis


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is proved of the results of some primitives.

    Attributes:
      name: of the rule.
      why: what is proved, and why no more.
      names: the primitives.
    """

    name: str
    why: str
    names: frozenset[str]


#: Modules that bring primitives of their own; those without a backend here are told by name.
MODULES = (
    "jax jax.numpy jax.scipy.linalg jax.scipy.special jax.scipy.sparse.linalg jax.scipy.stats "
    "jax.scipy.signal jax.scipy.optimize jax.nn jax.random jax.lax.linalg jax.image jax.ops "
    "jax.custom_batching jax.custom_derivatives jax.debug jax.ffi jax.export jax.ref "
    "jax.experimental.sparse jax.experimental.pallas jax.experimental.pallas.tpu "
    "jax.experimental.pallas.mosaic_gpu jax.experimental.pallas.triton "
    "jax.experimental.multihost_utils jax.experimental.compute_on "
    "jax.experimental.buffer_callback jax.experimental.rnn jax.experimental.hijax "
    "jax.experimental.xla_metadata jax.experimental.scheduling_groups jax.experimental.fused "
    "jax.experimental.shard_map jax.experimental.checkify jax.experimental.key_reuse "
    "jax.experimental.custom_partitioning jax.experimental.jet jax.experimental.ode "
    "jax.experimental.roofline jax.experimental.colocated_python distjax distjax.testing"
).split()
#: Those that one of the two lines of JAX lacks.
OPTIONAL_MODULES = ("jax.experimental.shard_alike",)

_OTHER_COLLECTIVES = """
    all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start all_to_all
    all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done pbroadcast_dynamic
    pbroadcast_start ppermute ppermute_done ppermute_start precv preduced psend psum_done
    psum_invariant_start psum_start pvary ragged_all_to_all reduce_scatter reduce_scatter_done
    reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin
    unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
    vary_unreduced_cast vary_unreduced_cast_p
"""

_EFFECTS = """
    accum_grad_in_ref addupdate box_get box_set check core_map create_linear dce_sink
    debug_callback debug_print empty_ref free_ref freeze get inspect_sharding log_extend log_read
    new_box new_log new_ref run_state swap
"""

_INNER = """
    call call_hi_primitive call_hi_primitive_linearized cudnn_fusion custom_jvp_call_jaxpr
    custom_partitioning custom_vmap_call fused_call linear_call pallas_call remat_opt shard_map
    xla_metadata_call
"""

_KERNELS = """
    _copysign async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem
    async_load async_prefetch async_store_smem async_store_tmem atomic_cas atomic_rmw
    barrier_arrive barrier_arrive_and_wait barrier_test barrier_wait bitcast commit_group
    commit_smem commit_tmem conv copy_gmem_to_smem copy_smem_to_gmem custom_fusion debug_barrier
    debug_barrier_p delay dma_start dma_wait einshape_lo elementwise_inline_asm
    elementwise_inline_asm_p emit_pipeline get_barrier_semaphore get_global
    griddepcontrol_launch_dependents griddepcontrol_wait has_memory_space inline_mgpu
    inline_mgpu_p jaxpr_call layout_cast load masked_load masked_swap matmul_acc_lhs
    matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs max_contiguous mgpu_atomic_store
    mma mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
    mpmd_map multimem_load_reduce multimem_store multiple_of num_programs pack_dtype
    pack_elementwise pipeline_body print_layout prng_join prng_random_bits prng_seed prng_split
    program_id query_cluster_cancel reciprocal remove_memory_space roll run_scoped semaphore_read
    semaphore_signal semaphore_signal_multicast semaphore_signal_parallel semaphore_wait
    set_max_registers set_max_registers_p stochastic_round store tcgen05_commit_arrive tcgen05_mma
    trace_value try_cluster_cancel unpack_dtype unpack_elementwise wait_gmem_to_smem
    wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p
    wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait
"""

_FUNCTIONS = """
    abs acos acosh add add_any add_dependency after_all and approx_top_k argmax argmin asin asinh
    atan atan2 atanh bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
    bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose
    bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense bessel_i0e bessel_i1e
    bitcast_convert_type broadcast_in_dim broadcast_to cbrt ceil cholesky cholesky_update clamp
    clz complex concatenate conj conv_general_dilated convert_element_type coo_fromdense
    coo_matmat coo_matvec coo_spmm coo_spmv coo_todense copy cos cosh create_token csr_fromdense
    csr_matmat csr_matvec csr_spmm csr_spmv csr_todense cumlogsumexp cummax cummin cumprod cumsum
    custom_lin digamma dim_as_value dimension_size div dot_general dot_product_attention_bwd
    dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
    dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
    dot_product_attention_fwd_wrapper dynamic_slice dynamic_update_slice empty2 eig eigh eq eq_to
    erf erf_inv erfc exp exp2 expm1 fft floor from_edtype gather ge geqp3 geqrf gt hessenberg
    householder_product igamma igamma_grad_a igammac imag integer_pow iota iota_2x32_shape
    is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to lu
    lu_pivots_to_permutation max min mul mulhi name ne neg nextafter not one_minus_square or ormqr
    pad philox2x32 philox4x32 pin platform_index polygamma polynomial population_count pow qr
    ragged_dot_general random_bits random_clone random_fold_in random_gamma random_seed
    random_split random_unwrap random_wrap real reduce reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min
    reduce_window_sum reduce_xor regularized_incomplete_beta relayout rem reshape reshard rev
    rng_bit_generator rnn_bwd rnn_fwd round rsqrt scaled_dot scaled_matmul scaled_matmul_wrapper
    scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub schur
    select_and_gather_add select_and_scatter select_and_scatter_add select_n shape_assertion
    shard_alike sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh slice sort split spsolve sqrt square squeeze stack stage stop_gradient sub svd
    symmetric_product tan tanh threefry2x32 threefry4x32 tie tile to_edtype todense top_k
    transpose triangular_solve tridiagonal tridiagonal_solve unpin unreachable unstack
    with_memory_space_constraint xla_metadata_value xor zeros_like zeta
"""


def _rule(name, why, names):
    return Rule(name, why, frozenset(names.split() if isinstance(names, str) else names))


RULES = (
    _rule(
        "loops and branches",
        "a fixpoint over the carry, a join over the branches; all differs by a predicate that does",
        "scan while cond",
    ),
    _rule("calls", "what their one jaxpr proves of their own operands", jaxprs.CALLS),
    _rule("solvers", "what the jaxpr that runs proves", "custom_linear_solve"),
    _rule("each operand", "an operand comes out as it went in", analysis.EACH),
    _rule(
        "equalizing collectives",
        "equal, over the whole axis and not in groups: every replica has the same operands",
        analysis.EQUALIZING,
    ),
    _rule(
        "other collectives",
        "differs: each replica has its own part, or one half of a collective that is still under "
        "way, or a type that a strategy's own program does not have (check_vma=False)",
        _OTHER_COLLECTIVES,
    ),
    _rule(
        "not functions",
        "differs: the value does not follow from the operands, or nothing shows that it does",
        analysis.IMPURE,
    ),
    _rule(
        "effects and references",
        "differs: what a reference or box holds is not followed through its writes",
        _EFFECTS,
    ),
    _rule(
        "inner jaxprs",
        "equal where all operands are and no inner equation is a source of difference: their "
        "rules for derivatives, batches or partitions are not known; a HiPrim is known by its "
        "class or by a jaxpr, and a user's own is not",
        _INNER,
    ),
    _rule(
        "inside kernels",
        "never seen alone: a kernel (pallas_call) writes references, so that its results differ",
        _KERNELS,
    ),
    _rule(
        "the machine's own",
        "emitted between segments with proofs of their own, or of the reference interpreter only",
        "distjax_merge_call distjax_variable distjax_reference_all_reduce",
    ),
    _rule(
        "functions of their operands",
        "equal where all operands are: the same numbers give the same result on every replica",
        _FUNCTIONS,
    ),
)

#: Classes behind `call_hi_primitive` that hold a jaxpr of what they run, or are never staged here.
HI_PRIMITIVES_WITH_JAXPRS = frozenset(
    "CustomRoot CustomVJPTraced CustomJVPTraced RematTraced OptRemat Scan3 Fusible".split()
)
#: Others: their results differ, since nothing shows what they run.
OTHER_HI_PRIMITIVES = frozenset(
    "VmapOf CustomRemat Einshape CheckpointNameFwd PrimalLeftTangentRight _RootLinearMap "
    "NewBox BoxSet BoxGet LogExtend NewLog ReadLog".split()
)
