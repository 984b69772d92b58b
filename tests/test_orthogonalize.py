"""Orthogonalisation: kernels against float64 formulas, fast path against reference,
the composite polynomial against the polar factor.

On a CPU the kernels run in Triton's interpreter, which has to be chosen before triton is imported: run this file in its
own process. On a GPU: TRITON_INTERPRET=0 pytest tests/test_orthogonalize.py (all of it, compiled).
"""
import functools
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

import train_gpt as tg

DEFAULT = tg.ORTHOGONALIZATIONS["polar-express"]
INTERPRETED = type(tg.gram_kernel).__name__ == "InterpretedFunction"
COMPILED = tg.triton is not None and not INTERPRETED and torch.cuda.is_available()
DEVICE = "cuda" if COMPILED else "cpu"
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or COMPILED), reason="needs triton, interpreted or with a GPU"
)
needs_gpu = pytest.mark.skipif(not COMPILED, reason="needs a GPU and TRITON_INTERPRET=0")

SHAPES = [(1, 12), (6, 12), (12, 6), (65, 130), (130, 65), (200, 200)]
TILES = {
    "by shape": None,
    "large": dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=2),
}
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3}  # dtype: largest error, relative to the largest entry
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gaussian(*shape, seed=0):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def inside_nan(values, dtype, margin=140):
    """The values as a view into a larger buffer of NaN: no stride is a product of sizes; any use of the rest shows."""
    batch, rows, columns = values.shape
    buffer = torch.full(
        (batch + 1, rows + margin, columns + margin), torch.nan, dtype=dtype, device=DEVICE
    )
    view = buffer[:batch, 2 : 2 + rows, 3 : 3 + columns]
    view.copy_(values)
    return buffer, view


def check(out_buffer, out, expected, dtype):
    """out equals the float64 expectation, and nothing around it was written."""
    error = (out.double().cpu() - expected).abs().max() / expected.abs().max()
    assert error < DTYPES[dtype]
    assert torch.isnan(out_buffer).sum() == out_buffer.numel() - out.numel()


@needs_kernels
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@dtypes
@shapes
@pytest.mark.fast
def test_gram(shape, dtype, tiles):
    values = gaussian(2, *shape)
    _, matrices = inside_nan(values, dtype)
    X, exact = (M.mT if shape[0] > shape[1] else M for M in (matrices, matrices.double().cpu()))
    buffer, out = inside_nan(
        torch.full((2, X.size(1), X.size(1)), torch.nan), dtype, margin=135
    )
    tg.gram(X, out=out, tiles=tiles)
    check(buffer, out, exact @ exact.mT, dtype)
    assert torch.equal(out, out.mT)


@needs_kernels
def test_triangular_grid_covers_every_tile():
    """20 rows of tiles here; the formula alone for 1100 rows of them, where a square root could round wrongly."""
    tiles = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, num_warps=4, num_stages=2)
    X = gaussian(1, 310, 3).float().to(DEVICE)
    out = tg.gram(X, out=torch.full((1, 310, 310), torch.nan, device=DEVICE), tiles=tiles)
    torch.testing.assert_close(out, X @ X.mT, rtol=1e-5, atol=1e-5)
    i = torch.arange(1100)
    for tile in (i * (i + 1) // 2, i * (i + 3) // 2):  # first and last tile of each row
        assert torch.equal((((8.0 * tile.float() + 5.0).sqrt() - 1.0) * 0.5).int(), i.int())


@needs_kernels
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@dtypes
@pytest.mark.parametrize("n", [1, 6, 65, 200])
@pytest.mark.fast
def test_polynomial_of_symmetric_matrix(n, dtype, tiles):
    values = gaussian(2, n, n)
    _, A = inside_nan((values + values.mT) / n**0.5, dtype)
    buffer, out = inside_nan(torch.full((2, n, n), torch.nan), dtype, margin=135)
    tg.gram(A, out=out, scale=2.0315, x_scale=-4.775, tiles=tiles)
    exact = A.double().cpu()
    check(buffer, out, -4.775 * exact + 2.0315 * exact @ exact, dtype)
    assert torch.equal(out, out.mT)


@needs_kernels
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@dtypes
@shapes
@pytest.mark.fast
def test_product(shape, dtype, tiles):
    n = min(shape)
    tall = shape[0] > shape[1]
    square = gaussian(2, n, n, seed=1)
    _, matrices = inside_nan(gaussian(2, *shape), dtype)
    _, B = inside_nan((square + square.mT) / n**0.5, dtype)
    buffer, out = inside_nan(torch.full((2, *shape), torch.nan), dtype, margin=135)
    tg.add_product(
        B, matrices.mT if tall else matrices, 3.4445, out=out.mT if tall else out, tiles=tiles
    )
    X = matrices.double().cpu()
    B = B.double().cpu()
    check(buffer, out, 3.4445 * X + (X @ B if tall else B @ X), dtype)


@needs_kernels
@pytest.mark.fast
def test_each_matrix_counts_times_its_factor():
    """In the products of a round, as if it had been multiplied before."""
    factors = torch.tensor([0.5, 3.0])
    X = gaussian(2, 20, 40)
    A = X @ X.mT
    scaled = factors[:, None, None] * X
    squares = factors[:, None, None] ** 2 * A
    on_device = lambda values: values.float().to(DEVICE)
    polynomial = tg.gram(
        on_device(A),
        out=torch.empty(2, 20, 20).to(DEVICE),
        scale=0.3,
        x_scale=-0.7,
        factors=on_device(factors.square()),
    )
    exact = 0.3 * squares @ squares - 0.7 * squares
    assert (polynomial.double().cpu() - exact).norm() < 1e-5 * exact.norm()
    product = tg.add_product(
        on_device(A),
        on_device(X),
        0.4,
        out=torch.empty(2, 20, 40).to(DEVICE),
        factors=on_device(factors),
    )
    exact = A @ scaled + 0.4 * scaled
    assert (product.double().cpu() - exact).norm() < 1e-5 * exact.norm()


@needs_kernels
@pytest.mark.parametrize("method", ["polar-express", "quintic"])
@pytest.mark.fast
def test_the_size_of_a_matrix_is_of_no_account(method):
    """From gradients of 1e-6 to 1e6, in one batch; a zero matrix stays zero."""
    method = tg.ORTHOGONALIZATIONS[method]
    sizes = torch.tensor([0.0, 1e-6, 1.0, 1e6])
    values = gaussian(1, 24, 48).float()
    out = tg.orthogonalize((sizes[:, None, None] * values).to(DEVICE), method, torch.float32)
    assert not out[0].any()
    expected = tg.orthogonalize_reference(values.to(DEVICE), method)
    for found in out[1:]:
        assert (found - expected[0]).norm() < 1e-4 * expected.norm()


@needs_kernels
@pytest.mark.fast
def test_symmetric_output_from_asymmetric_input():
    """Rounding must not break the symmetry of a tile on the diagonal: its upper half is a copy."""
    out = tg.gram(
        gaussian(1, 70, 70).float().to(DEVICE), out=torch.empty(1, 70, 70).to(DEVICE), x_scale=1.0
    )
    assert torch.equal(out, out.mT)


@pytest.mark.skipif(not INTERPRETED, reason="watches the interpreter")
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("n, m", [(1, 12), (6, 12), (65, 130)])
def test_no_address_outside_the_operands(monkeypatch, n, m, tall):
    """Every lane that loads or stores does so inside X, B or the output, also where the value would not matter."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    X, Y = (
        inside_nan(gaussian(2, *((m, n) if tall else (n, m))), torch.float32)[1] for _ in range(2)
    )
    A, B = (inside_nan(gaussian(2, n, n), torch.float32)[1] for _ in range(2))
    touched = []

    def watch(name):
        original = getattr(Builder, name)

        def watched(self, pointers, *rest):
            mask = rest[0 if "load" in name else 1].data
            touched.append(torch.from_numpy(pointers.data[mask].astype("int64")))
            return original(self, pointers, *rest)

        monkeypatch.setattr(Builder, name, watched)

    watch("create_masked_load")
    watch("create_masked_store")
    X, Y = (X.mT, Y.mT) if tall else (X, Y)
    tg.gram(X, out=A)
    tg.gram(A, out=B, x_scale=1.0)
    tg.add_product(B, X, 1.0, out=Y)
    allowed = []
    for view in (X, Y, A, B):
        axes = (stride * torch.arange(size) for size, stride in zip(view.shape, view.stride()))
        b, i, j = torch.meshgrid(*axes, indexing="ij")
        allowed.append(view.data_ptr() + 4 * (b + i + j).flatten())
    assert torch.equal(torch.cat(touched).unique(), torch.cat(allowed).unique())


@needs_kernels
@pytest.mark.fast
def test_product_does_not_assume_symmetry():
    """B is read as it stands, so an error that symmetry would hide shows."""
    B = gaussian(1, 70, 70).float().to(DEVICE)
    X = gaussian(1, 70, 100).float().to(DEVICE)
    out = tg.add_product(B, X, 0.0, out=torch.empty_like(X))
    torch.testing.assert_close(out.double(), B.double() @ X.double(), rtol=1e-5, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 12), (12, 6), (65, 130), (130, 65), (70, 70)], ids=str)
@pytest.mark.parametrize("method", tg.ORTHOGONALIZATIONS)
def test_fast_path_equals_reference(method, shape):
    method = tg.ORTHOGONALIZATIONS[method]
    values = gaussian(2, *shape).float().to(DEVICE)
    _, strided = inside_nan(values, torch.float32)
    expected = tg.orthogonalize_reference(values, method)
    for matrices in (values, strided):
        out = tg.orthogonalize(matrices, method, torch.float32)
        assert out.shape == values.shape
        assert out.dtype == torch.float32
        assert (out - expected).norm() / expected.norm() < 5e-5
        assert torch.equal(matrices, values)


@needs_kernels
def test_half_precision_stays_close_to_float64():
    values = gaussian(1, 65, 130)
    out = tg.orthogonalize(values.float().to(DEVICE), DEFAULT, torch.float16)
    expected = tg.orthogonalize_reference(values, DEFAULT)
    assert out.dtype == torch.float16
    assert (out.double().cpu() - expected).norm() / expected.norm() < 0.02


# Of each method: where the singular values of a gaussian matrix of aspect 3 end, and the polar error of such a matrix
# and of a square one.
BOUNDS = {
    "polar-express": ((0.77, 1.23), 0.17, 0.22),
    "polar-express-5": ((0.83, 1.17), 0.11, 0.14),
    "turbo": ((0.83, 1.17), 0.11, 0.16),
    "quintic": ((0.65, 1.25), 0.23, 0.23),
}


@pytest.mark.parametrize(
    "shape", [(64, 192), (192, 64), (96, 96)], ids=lambda shape: "x".join(map(str, shape))
)
@pytest.mark.parametrize("path", ["reference", pytest.param("fast", marks=needs_kernels)])
@pytest.mark.parametrize("method", tg.ORTHOGONALIZATIONS)
@pytest.mark.fast
def test_close_to_polar_factor(method, path, shape):
    values = gaussian(1, *shape, seed=3)
    fast = path == "fast"
    matrices = values.float().to(DEVICE) if fast else values
    run = (
        functools.partial(tg.orthogonalize, dtype=torch.float32)
        if fast
        else tg.orthogonalize_reference
    )
    out = run(matrices, tg.ORTHOGONALIZATIONS[method]).double().cpu()
    U, _, Vh = torch.linalg.svd(values, full_matrices=False)
    (low, high), error_wide, error_square = BOUNDS[method]
    error = (out - U @ Vh).norm() / (U @ Vh).norm()
    assert error < (error_square if shape[0] == shape[1] else error_wide)
    singular = torch.linalg.svdvals(out)
    assert singular.max() < high
    assert shape[0] == shape[1] or singular.min() > low


@pytest.mark.fast
def test_gain_and_room_above_one():
    """Slope at 0 of the composite; inputs 2 % above the norm, far more than bf16 adds, stay in bounds."""
    gain = torch.tensor([a for a, _, _ in DEFAULT.coefficients]).prod() / DEFAULT.safety
    assert gain == pytest.approx(277.2, rel=2e-3)
    x = torch.linspace(0.01, 1.02, 1000, dtype=torch.float64) / DEFAULT.safety
    for a, b, c in DEFAULT.coefficients:
        x = a * x + b * x**3 + c * x**5
    low, high = BOUNDS["polar-express"][0]
    assert low < x.min()
    assert x.max() < high


@pytest.mark.fast
def test_the_published_methods():
    """Rounds and scales as published:
    the five of Polar Express, of which Turbo-Muon drops the first, and Muon's own."""
    methods = tg.ORTHOGONALIZATIONS
    assert [len(method.coefficients) for method in methods.values()] == [4, 5, 4, 5]
    assert methods["turbo"].safety is None
    assert methods["turbo"].coefficients == methods["polar-express-5"].coefficients[1:]
    published = (
        (8.1565545, -22.4832929, 15.8787699),
        (4.0429299, -2.8089175, 0.5000178),
        (3.8916678, -2.7724842, 0.5060648),
        (3.2857537, -2.3681295, 0.4644902),
        (2.3465413, -1.7097828, 0.4232355),
    )
    for row, rounded in zip(methods["polar-express-5"].coefficients, published, strict=True):
        assert row == pytest.approx(rounded, rel=1e-6)
    assert set(methods["quintic"].coefficients) == {(3.4445, -4.7750, 2.0315)}


@pytest.mark.parametrize("shape", [(24, 24), (24, 80)], ids=str)
@pytest.mark.fast
def test_aol_scales_rows_below_one_without_a_product(shape):
    """Row i is divided by the root of sum_j |A_ij|; the Gram matrix is that of the scaled matrix, exactly symmetric."""
    values = gaussian(2, *shape) * torch.logspace(-3, 3, shape[0], dtype=torch.float64)[:, None]
    values[0, 5] = 0
    gram = values @ values.mT
    scaled, scaled_gram = tg.aol_scale(values, gram)
    for i in range(shape[0]):
        if i != 5:
            divisor = sum(abs(gram[0, i, j]) for j in range(shape[0])) ** 0.5
            torch.testing.assert_close(scaled[0, i], values[0, i] / divisor)
    assert (scaled[0, 5] == 0).all()
    assert torch.isfinite(scaled).all()
    torch.testing.assert_close(scaled_gram, scaled @ scaled.mT)
    assert torch.equal(scaled_gram, scaled_gram.mT)
    assert torch.linalg.matrix_norm(scaled, ord=2).max() <= 1 + 1e-12


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("method", tg.ORTHOGONALIZATIONS)
@pytest.mark.fast
def test_reference_applies_the_composite_polynomial(method, transposed):
    """A diagonal matrix keeps its singular vectors, so every entry follows the scalar polynomial. AOL makes all rows
    alike at once, as |A_ii| is their squared norm."""
    method = tg.ORTHOGONALIZATIONS[method]
    s = torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64)
    matrix = torch.zeros(4, 9, dtype=torch.float64)
    matrix[range(4), range(4)] = s
    x = torch.ones_like(s) if method.safety is None else s / s.norm() / method.safety
    for a, b, c in method.coefficients:
        x = a * x + b * x**3 + c * x**5
    out = tg.orthogonalize_reference(7 * (matrix.T if transposed else matrix), method)
    out = out.T if transposed else out
    torch.testing.assert_close(out.diagonal(), x)
    assert out.sum().isclose(x.sum())


@pytest.mark.parametrize("factor", [1e-6, 1e5])
@pytest.mark.parametrize("path", ["reference", pytest.param("fast", marks=needs_kernels)])
@pytest.mark.parametrize("method", tg.ORTHOGONALIZATIONS.values(), ids=tg.ORTHOGONALIZATIONS)
def test_scale_invariance(method, path, factor):
    values = gaussian(1, 20, 33).float().to(DEVICE)
    run = (
        tg.orthogonalize_reference
        if path == "reference"
        else lambda *a: tg.orthogonalize(*a, torch.float32)
    )
    torch.testing.assert_close(
        run(factor * values, method), run(values, method), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("path", ["reference", pytest.param("fast", marks=needs_kernels)])
@pytest.mark.parametrize("method", tg.ORTHOGONALIZATIONS.values(), ids=tg.ORTHOGONALIZATIONS)
def test_zero_matrix_and_zero_row(method, path):
    values = gaussian(3, 6, 12).float().to(DEVICE)
    values[1] = 0
    values[2, 3] = 0
    run = (
        tg.orthogonalize_reference
        if path == "reference"
        else lambda *a: tg.orthogonalize(*a, torch.float32)
    )
    out = run(values, method)
    assert torch.isfinite(out).all()
    assert (out[1] == 0).all()
    assert (out[2, 3] == 0).all()
    assert out[0].norm() > 2


@pytest.mark.fast
def test_tiles_fit_in_shared_memory():
    for dtype in (torch.bfloat16, torch.float32):
        for batch, rows, columns in (
            (40, 768, 768),
            (3, 768, 3072),
            (60, 256, 768),
            (8, 6, 12),
        ):
            for symmetric in (True, False):
                tiles = tg.product_tiles(batch, rows, columns, dtype, symmetric)
                staged = (
                    (tiles["BLOCK_M"] + tiles["BLOCK_N"]) * tiles["BLOCK_K"] * tiles["num_stages"]
                )
                assert staged * dtype.itemsize <= 227 * 1024
                assert not symmetric or tiles["BLOCK_M"] == tiles["BLOCK_N"]


def orthogonalize_rounded(values, method):
    """The reference for wide matrices in float32, with what the kernels write rounded to bfloat16:
    each product, and the X they begin with."""
    X = values.bfloat16().float()
    if method.safety is not None:
        X = tg.frobenius_scale(values.float(), method.safety, torch.bfloat16).float()
    for number, (a, b, c) in enumerate(method.coefficients):
        A = (X @ X.mT).bfloat16().float()
        if number == 0 and method.safety is None:
            X, A = (x.float() for x in tg.aol_scale(X.bfloat16(), A.bfloat16()))
        P = (b * A + c * A @ A).bfloat16().float()
        X = (a * X + P @ X).bfloat16().float()
    return X


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "shape", [(8, 768, 768), (3, 3072, 768), (8, 256, 768), (4, 6, 12), (2, 1, 12)], ids=str
)
@pytest.mark.parametrize("method", tg.ORTHOGONALIZATIONS.values(), ids=tg.ORTHOGONALIZATIONS)
def test_bf16_on_gpu(method, shape):
    """Against the same rounding:
    float64's result is up to a quarter away where a matrix has one row, so one singular value."""
    values = gaussian(*shape)
    out = tg.orthogonalize(values.float().cuda(), method).cpu()
    tall = shape[1] > shape[2]
    expected = (
        orthogonalize_rounded(values.mT, method).mT
        if tall
        else orthogonalize_rounded(values, method)
    )
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < 0.02


@pytest.mark.gpu
@needs_gpu
def test_cuda_graph_replay():
    values = gaussian(4, 256, 768).float().cuda()
    expected = tg.orthogonalize(values, DEFAULT)  # compiles the kernels, which a capture must not
    static = torch.zeros_like(values)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = tg.orthogonalize(static, DEFAULT)
    static.copy_(values)
    graph.replay()
    assert torch.equal(out, expected)
