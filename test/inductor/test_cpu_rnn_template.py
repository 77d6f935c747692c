# Owner(s): ["module: inductor"]
"""The C++ kernel of recurrent layers: results, packing, threads, vector sizes."""

import copy
import os
import subprocess
import sys
import unittest

import torch
import torch.utils._pytree as pytree
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.rnn_ops import GATES
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


KINDS = {
    "LSTM": (torch.nn.LSTM, {}),
    "LSTM_proj": (torch.nn.LSTM, {"proj_size": 11}),
    "GRU": (torch.nn.GRU, {}),
    "RNN_TANH": (torch.nn.RNN, {}),
    "RNN_RELU": (torch.nn.RNN, {"nonlinearity": "relu"}),
}


def _make(kind, *sizes, **kwargs):
    torch.manual_seed(0)
    cls, extra = KINDS[kind]
    return cls(*sizes, **extra, **kwargs).eval()


def _state(module, batch_size):
    count = module.num_layers * (2 if module.bidirectional else 1)
    hx = torch.randn(count, batch_size, module.proj_size or module.hidden_size)
    if not isinstance(module, torch.nn.LSTM):
        return hx
    return hx, torch.randn(count, batch_size, module.hidden_size)


class TestRnnTemplate(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        self.enterContext(torch.no_grad())
        self.enterContext(config.patch(fx_graph_cache=False))
        threads = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, threads)

    def check(self, module, compiled, *args):
        """Compare with float64: no more than twice the error of eager."""

        def error(result, reference):
            norm = max(reference.norm().item(), 1e-30)
            return (result.double() - reference).norm().item() / norm

        wide = pytree.tree_map_only(torch.Tensor, lambda t: t.double(), args)
        reference = copy.deepcopy(module).double()(*wide)
        results = [pytree.tree_leaves(r) for r in (compiled(*args), module(*args))]
        for ours, eager, exact in zip(*results, pytree.tree_leaves(reference)):
            self.assertEqual(ours.shape, eager.shape)
            self.assertLessEqual(error(ours, exact), 2 * error(eager, exact) + 1e-7)

    def assertCounts(self, layers, packed):
        got = counters["inductor"]
        self.assertEqual(got["rnn_layers_matcher_count"], layers)
        self.assertEqual(got["rnn_weight_pack_matcher_count"], packed)
        self.assertEqual(got["cpp_templated_kernel_counter"], layers)

    @parametrize("freezing", (True, False))
    @parametrize("kind", KINDS)
    def test_kinds(self, kind, freezing):
        # Sizes beside the vector size, two layers, both directions, dynamic T and B;
        # T * B below and above the size from which weights are packed in the call
        module = _make(kind, 13, 29, num_layers=2, bidirectional=True)
        with config.patch(freezing=freezing):
            compiled = torch.compile(module, fullgraph=True, dynamic=True)
            self.check(module, compiled, torch.randn(2, 3, 13))
            self.assertCounts(2, 4 if freezing else 0)
            for seq_len, batch_size in ((5, 3), (17, 9), (3, 40)):
                self.check(module, compiled, torch.randn(seq_len, batch_size, 13))
        self.assertCounts(2, 4 if freezing else 0)
        count = counters["inductor"][f"{module.mode.lower()}_weight_pack_matcher_count"]
        self.assertEqual(count, 4 if freezing else 0)

    @parametrize("kind", KINDS)
    def test_state_bias_batch_first(self, kind):
        module = _make(kind, 8, 40, bias=False, batch_first=True, bidirectional=True)
        with config.patch(freezing=True):
            compiled = torch.compile(module, fullgraph=True, dynamic=True)
            for batch_size, seq_len in ((3, 5), (10, 4)):
                x = torch.randn(8, seq_len, batch_size).permute(2, 1, 0)
                self.check(module, compiled, x, _state(module, batch_size))
                self.assertCounts(1, 2)

    @parametrize("kind", ("LSTM_proj", "GRU"))
    @parametrize("hidden_size", (12, 181, 300))
    def test_sizes(self, kind, hidden_size):
        # 300 and 181 are more than a block of the L1 cache, 12 is not two vectors
        module = _make(kind, 1, hidden_size)
        with config.patch(freezing=True):
            compiled = torch.compile(module, fullgraph=True)
            self.check(module, compiled, torch.randn(7, 13, 1))

    @parametrize("kind", ("GRU", "RNN_TANH"))
    def test_one_unit(self, kind):
        module = _make(kind, 5, 1)
        with config.patch(freezing=True):
            compiled = torch.compile(module, fullgraph=True)
            self.check(module, compiled, torch.randn(7, 3, 5))

    @parametrize("kind", ("LSTM", "LSTM_proj"))
    def test_threads(self, kind):
        # Batch 1: threads share the panels, with a barrier in each step; 8 are more
        # than the cores of many machines. Batch 32: they share the rows.
        for bidirectional in (False, True):
            module = _make(kind, 16, 128, bidirectional=bidirectional)
            with config.patch({"freezing": True, "cpp.dynamic_threads": True}):
                compiled = torch.compile(module, fullgraph=True, dynamic=True)
                for threads in (1, 2, 3, 8):
                    torch.set_num_threads(threads)
                    for batch_size in (2, 32):
                        x = torch.randn(100, batch_size, 16)
                        self.check(module, compiled, x, _state(module, batch_size))

    @parametrize("freezing", (True, False))
    def test_single_step(self, freezing):
        module = _make("LSTM", 24, 24)
        with config.patch(freezing=freezing):
            compiled = torch.compile(module, fullgraph=True)
            self.check(module, compiled, torch.randn(1, 1, 24), _state(module, 1))
        self.assertCounts(1, int(freezing))

    def test_empty_batch(self):
        module = _make("GRU", 4, 8)
        with config.patch(freezing=True):
            compiled = torch.compile(module, fullgraph=True)
            output, state = compiled(torch.randn(5, 0, 4))
        self.assertEqual(output.shape, (5, 0, 8))
        self.assertEqual(state.shape, (1, 0, 8))

    @parametrize("kind", ("LSTM", "GRU"))
    def test_unread_outputs(self, kind):
        module = _make(kind, 4, 8)
        x = torch.randn(6, 3, 4)
        for pick in (lambda y, s: y, lambda y, s: pytree.tree_leaves(s)[-1]):

            def run(x):
                return pick(*module(x)).relu()

            torch._dynamo.reset()
            with config.patch(freezing=True):
                self.assertEqual(torch.compile(run)(x), run(x))

    def test_one_constant_a_direction(self):
        # The packed weights take the place of the weights.
        module = _make("LSTM", 8, 16, bidirectional=True)
        x = torch.randn(3, 2, 8)
        with config.patch(freezing=True):
            _, (code,) = run_and_get_code(torch.compile(module), x)
        frozen = {word for word in code.split() if word.startswith("_frozen_param")}
        self.assertEqual(len({word.strip("(),") for word in frozen}), 2)
        self.assertEqual(code.count("cpp_fused_0("), 1)
        self.assertNotIn("mkldnn", code)

    def test_turned_off(self):
        with config.patch({"freezing": True, "cpp.rnn_template": False}):
            for kind in ("LSTM", "GRU"):
                module = _make(kind, 4, 8)
                torch._dynamo.reset()
                compiled = torch.compile(module, fullgraph=True)
                self.check(module, compiled, torch.randn(6, 3, 4))
        self.assertCounts(0, 0)

    @parametrize("dtype", (torch.bfloat16, torch.float64))
    def test_other_types_go_elsewhere(self, dtype):
        module = _make("GRU", 4, 8).to(dtype)
        x = torch.randn(6, 3, 4, dtype=dtype)
        self.assertEqual(torch.compile(module)(x), module(x))
        self.assertCounts(0, 0)

    @parametrize("kind", KINDS)
    def test_extreme_inputs(self, kind):
        # Each value fills a sequence of the batch, so that nan does not spread.
        values = [0.0, 1e-30, 100.0, -100.0, 1e30, -1e30, torch.inf, -torch.inf]
        x = torch.tensor([*values, torch.nan]).repeat(4, 1).unsqueeze(2)
        module = _make(kind, 1, 13)
        with config.patch(freezing=True):
            result = torch.compile(module)(x)
        for ours, eager in zip(
            pytree.tree_leaves(result), pytree.tree_leaves(module(x))
        ):
            self.assertEqual(ours.isnan(), eager.isnan())
            self.assertEqual(ours, eager, rtol=1e-5, atol=1e-6, equal_nan=True)

    def test_functions_within_a_few_ulp(self):
        x = torch.linspace(-30, 30, 4001)
        x = torch.cat([x, x / 100, x / 10000]).reshape(1, -1, 1)
        tanh = _make("RNN_TANH", 1, 8, bias=False)
        tanh.weight_ih_l0.fill_(1)
        tanh.weight_hh_l0.fill_(0)
        # The new gate is tanh(0), so the state is multiplied with sigmoid(x).
        sigmoid = _make("GRU", 1, 8, bias=False)
        sigmoid.weight_ih_l0.fill_(1)
        sigmoid.weight_ih_l0[16:] = 0
        sigmoid.weight_hh_l0.fill_(0)
        ones = torch.ones(1, x.size(1), 8)
        with config.patch(freezing=True):
            results = {
                torch.tanh: torch.compile(tanh)(x)[0],
                torch.sigmoid: torch.compile(sigmoid)(x, ones)[0],
            }
        for function, result in results.items():
            exact = function(x.double())
            ulp = torch.finfo(torch.float).eps * exact.abs()
            error = ((result.double() - exact).abs() / (ulp + 1e-38)).max().item()
            self.assertLessEqual(error, 4, function.__name__)

    @parametrize("capability", ("default", "avx2", "avx512"))
    def test_vector_sizes(self, capability):
        """Compile and run for other vector instructions, in a process of its own."""
        has = torch.backends.cpu.get_cpu_capability().lower()
        if capability == "avx512" and has != "avx512":
            raise unittest.SkipTest("needs AVX-512")
        if capability == "avx2" and has == "default":
            raise unittest.SkipTest("needs AVX2")
        code = (
            "import torch; torch.set_grad_enabled(False); "
            "torch._inductor.config.freezing = True; "
            "modules = [torch.nn.LSTM(5, 21, proj_size=7, bidirectional=True), "
            "torch.nn.GRU(5, 21)]\n"
            "for m in modules:\n"
            "    x = torch.randn(6, 9, 5); m.eval()\n"
            "    torch.testing.assert_close(torch.compile(m)(x), m(x))\n"
            "n = torch._dynamo.utils.counters['inductor']\n"
            "assert n['cpp_templated_kernel_counter'] == 2, n\n"
        )
        env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
        self.assertEqual(run.returncode, 0, run.stderr.decode()[-3000:])


class TestRnnOps(TestCase):
    @parametrize("has_biases", (True, False))
    @parametrize("kind", KINDS)
    def test_packed_layer_is_the_layer(self, kind, has_biases):
        module = _make(kind, 5, 13, bias=has_biases, bidirectional=True)
        mode = module.mode
        x = torch.randn(4, 3, 5)
        weights = [list(ws) for ws in module.all_weights]
        lanes = 8
        pack = torch.ops.torch_rnn.rnn_pack_weights.default
        packed = [pack(ws, mode, has_biases, lanes) for ws in weights]
        units = 16 if GATES[mode] == 1 or lanes == 16 else 8
        self.assertEqual(packed[0].dim(), 1)
        self.assertEqual(packed[0].numel() % units, 0)
        sizes = (13, module.proj_size or 13, has_biases, [False, True])
        op = torch.ops.torch_rnn.rnn_layers.default
        with torch.no_grad():
            expected, state = module(x)
            raw = op(x, sum(weights, []), [], [], mode, *sizes, 0)
            output, hy, cy = op(x, packed, [], [], mode, *sizes, lanes)
        self.assertEqual(raw[0], expected)
        self.assertEqual(output, expected)
        hidden, *cell = state if mode == "LSTM" else (state,)
        self.assertEqual(hy, hidden)
        if cell:
            self.assertEqual(cy, cell[0])
        args = (x, [p.detach() for p in packed], [], [], mode, *sizes, lanes)
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


instantiate_parametrized_tests(TestRnnTemplate)
instantiate_parametrized_tests(TestRnnOps)


if __name__ == "__main__":
    run_tests()
