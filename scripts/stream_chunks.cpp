// Runs the package of stream_chunks.py step by step, without Python, and times the steps:
//     stream_chunks FILE LSTM|GRU HIDDEN

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s FILE LSTM|GRU HIDDEN\n", argv[0]);
    return 1;
  }
  try {
    // A stream has one caller, so the package may skip its locks.
    torch::inductor::AOTIModelPackageLoader package(
        argv[1], "model", /*run_single_threaded=*/true);
    const int64_t hidden = std::atoll(argv[3]);
    const size_t states = std::string(argv[2]) == "LSTM" ? 2 : 1;
    const at::Tensor chunk = torch::randn({1, 1, hidden});  // one step
    std::vector<at::Tensor> state(states, torch::zeros({1, 1, hidden}));
    std::vector<double> times;
    for (int i = 0; i < 1100; i++) {
      std::vector<at::Tensor> inputs = {chunk};
      inputs.insert(inputs.end(), state.begin(), state.end());
      const auto start = std::chrono::steady_clock::now();
      const std::vector<at::Tensor> outputs = package.run(inputs);
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - start;
      state.assign(outputs.begin() + 1, outputs.end());
      if (i >= 100) times.push_back(took.count());
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    std::printf("%s %s C++ %.1f us a step\n", argv[2], argv[3], times[times.size() / 2]);
  } catch (const std::exception& e) {
    // For instance a package for another CPU, or a state of the wrong size
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
