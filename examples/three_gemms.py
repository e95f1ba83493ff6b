"""The three matmuls of a linear layer in FP8, in plain PyTorch: `python examples/three_gemms.py`

This is what `torch.compile(model, backend="fp8", options={"recipe": "tensorwise"})` writes into a graph,
without the kernels that make it fast. FP8 matmuls want both operands "K-major": the contracted dimension lies
last. So the input, the weight and the gradient are each cast twice, once as they are and once transposed,
with one scale for both copies.

    fprop   y  = x  @ w.T    contracts the input features     x  [M, K]    w   [N, K]
    dgrad   dx = dy @ w      contracts the output features    dy [M, N]    w.T [K, N]
    wgrad   dw = dy.T @ x    contracts the tokens             dy.T [N, M]  x.T [K, M]
"""

import torch


def quantize(x, dtype):
    """x in FP8, and the inverse of its scale: the largest magnitude becomes the largest FP8 value."""
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax().float().clamp(min=1e-30)
    return (x.float() * scale).clamp(-largest, largest).to(dtype), 1 / scale


def matmul(a, b, a_inv, b_inv):
    """[M, K] and [N, K] -> [M, N]. On a GPU this is one FP8 matmul, `torch._scaled_mm`. A CPU multiplies the
    same values in float32."""
    return (a.float() @ b.float().t()) * (a_inv * b_inv)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, x_inv = quantize(x, torch.float8_e4m3fn)  # E4M3: 3 bits of mantissa
        w8, w_inv = quantize(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8.t().contiguous(), x_inv, w8.t().contiguous(), w_inv)  # one byte an element
        return matmul(x8, w8, x_inv, w_inv).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x8t, x_inv, w8t, w_inv = ctx.saved_tensors
        dy8, dy_inv = quantize(dy, torch.float8_e5m2)  # E5M2: gradients need range more than precision
        dx = matmul(dy8, w8t, dy_inv, w_inv)
        dw = matmul(dy8.t().contiguous(), x8t, dy_inv, x_inv)
        return dx.to(dy.dtype), dw.to(dy.dtype)


def main():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(256, 512, bias=False), torch.randn(128, 256, requires_grad=True)

    def step(function):
        y = function(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, layer.weight))

    compiled = torch.compile(layer, backend="fp8", options={"recipe": "tensorwise"})
    runs = {
        "float32": step(layer),
        "three gemms": step(lambda x: Linear.apply(x, layer.weight)),
        "fp8compile": step(compiled),
    }
    for name, exact, ours, theirs in zip(("y", "dx", "dw"), *runs.values(), strict=True):
        error, apart = (float((ours - other).norm() / exact.norm()) for other in (exact, theirs))
        print(f"{name}: {error:.2%} from float32, {apart:.0e} from fp8compile")


if __name__ == "__main__":
    main()
