// The processor time of a call of AOTInductor itself, by libtorch's loader: the input tensor is made once.
//
//   aotinductor_by_hand MODEL.pt2 SECONDS DTYPE RANK SIZES... -- BATCH...
//
// DTYPE is 1 (float32) or 11 (float64); sizes are those of a sample of the input, without the batch.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

namespace {

double now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 7) return 2;
    at::set_num_threads(1);
    c10::InferenceMode mode;
    torch::inductor::AOTIModelPackageLoader loader(arguments[1]);
    const double seconds = std::atof(arguments[2]);
    const auto dtype = std::atoi(arguments[3]) == 1 ? at::kFloat : at::kDouble;
    const int rank = std::atoi(arguments[4]);
    std::vector<std::int64_t> shape{1};
    for (int d = 0; d < rank; d++) shape.push_back(std::atol(arguments[5 + d]));
    std::printf("{\"per_call_s\": [");
    const int first = 6 + rank;
    for (int i = first; i < count; i++) {
        shape[0] = std::atol(arguments[i]);
        std::int64_t elements = 1;
        for (auto size : shape) elements *= size;
        const std::vector<at::Tensor> inputs{at::sin(at::arange(elements, at::kDouble)).to(dtype).reshape(shape)};
        loader.run(inputs);
        std::vector<double> rounds;
        long calls = 0;
        for (double begin = now(); now() - begin < seconds / 3; calls++) loader.run(inputs);
        for (int r = 0; r < 3; r++) {
            const double begin = now();
            for (long c = 0; c < calls; c++) loader.run(inputs);
            rounds.push_back((now() - begin) / static_cast<double>(calls));
        }
        std::sort(rounds.begin(), rounds.end());
        std::printf("%s%.9f", i > first ? ", " : "", rounds[1]);
    }
    std::printf("]}\n");
}
