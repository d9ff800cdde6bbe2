// C++17 wrapper of paceline.h: errors are exceptions, memory is released by destructors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "paceline.h"

namespace paceline {

class Error : public std::runtime_error {
  public:
    explicit Error(int code) : std::runtime_error(paceline_last_error()), code_(code) {}
    int code() const noexcept { return code_; }  // PACELINE_ERROR_...

  private:
    int code_;
};

inline void check(int code) {
    if (code != PACELINE_OK) throw Error(code);
}

template <class T> constexpr int dtype_of();
template <> constexpr int dtype_of<float>() { return PACELINE_FLOAT32; }
template <> constexpr int dtype_of<double>() { return PACELINE_FLOAT64; }

// An array of the caller, of float or double: pointer, shape, and strides in elements (none: row-major
// order). It does not own the data. C++20: a std::span s is {s.data(), {rows, columns}}.
template <class T> class Array {
  public:
    Array(T *data, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {})
        : data_(data), shape_(std::move(shape)), strides_(std::move(strides)) {
        if (!strides_.empty() && strides_.size() != shape_.size())
            throw std::invalid_argument("paceline: as many strides as sizes are needed");
    }
    paceline_tensor tensor() const {
        using Plain = std::remove_const_t<T>;
        return {const_cast<Plain *>(data_), dtype_of<Plain>(), static_cast<int>(shape_.size()), shape_.data(),
                strides_.empty() ? nullptr : strides_.data()};
    }

  private:
    T *data_;
    std::vector<std::int64_t> shape_, strides_;
};

struct Options {
    bool check_finite = false;  // each call checks inputs and outputs for NaN and infinity
    bool convert = false;       // arrays of the other dtype are converted
    int threads = 0;            // of ONNX Runtime or libtorch; 0: one
    std::string library;        // path of libonnxruntime.so or libtorch_cpu.so; empty: searched
};

// A loaded model. Threads may call the const functions at the same time.
class Model {
  public:
    explicit Model(const std::string &path, const Options &options = {}) {
        paceline_options plain = PACELINE_OPTIONS;
        if (options.check_finite) plain.flags |= PACELINE_CHECK_FINITE;
        if (options.convert) plain.flags |= PACELINE_CONVERT;
        plain.threads = options.threads;
        plain.library = options.library.empty() ? nullptr : options.library.c_str();
        check(paceline_load(path.c_str(), &plain, &model_));
    }
    ~Model() { paceline_free(model_); }
    Model(Model &&other) noexcept : model_(std::exchange(other.model_, nullptr)) {}
    Model &operator=(Model &&other) noexcept {
        std::swap(model_, other.model_);
        return *this;
    }
    Model(const Model &) = delete;
    Model &operator=(const Model &) = delete;

    // One input and one output in row-major order.
    void run(std::int64_t batch, const float *input, float *output) const {
        check(paceline_run_f32(model_, batch, input, output));
    }
    void run(std::int64_t batch, const double *input, double *output) const {
        check(paceline_run_f64(model_, batch, input, output));
    }
    template <class T> void run(const Array<const T> &input, const Array<T> &output) const {
        const paceline_tensor in = input.tensor(), out = output.tensor();
        check(paceline_run(model_, &in, 1, &out, 1));
    }
    // Several inputs and outputs: model.run({x.tensor(), y.tensor()}, {z.tensor()}).
    void run(std::initializer_list<paceline_tensor> inputs, std::initializer_list<paceline_tensor> outputs) const {
        check(paceline_run(model_, inputs.begin(), static_cast<int>(inputs.size()), outputs.begin(),
                           static_cast<int>(outputs.size())));
    }
    // Fields that lie apart, one of each feature: see paceline_run_fields_f64.
    void run_fields(std::int64_t batch, const std::vector<const float *> &in, const std::vector<float *> &out) const {
        check_fields(in.size(), out.size());
        check(paceline_run_fields_f32(model_, batch, in.data(), nullptr, out.data(), nullptr));
    }
    void run_fields(std::int64_t batch, const std::vector<const double *> &in, const std::vector<double *> &out) const {
        check_fields(in.size(), out.size());
        check(paceline_run_fields_f64(model_, batch, in.data(), nullptr, out.data(), nullptr));
    }

    std::vector<paceline_info> inputs() const {
        std::vector<paceline_info> all(static_cast<std::size_t>(paceline_inputs(model_)));
        for (std::size_t i = 0; i < all.size(); i++) check(paceline_input_info(model_, static_cast<int>(i), &all[i]));
        return all;
    }
    std::vector<paceline_info> outputs() const {
        std::vector<paceline_info> all(static_cast<std::size_t>(paceline_outputs(model_)));
        for (std::size_t i = 0; i < all.size(); i++) check(paceline_output_info(model_, static_cast<int>(i), &all[i]));
        return all;
    }
    std::string describe() const { return paceline_describe(model_); }  // the manifest, as JSON
    std::string backend() const { return paceline_backend(model_); }
    double test() const {  // largest error of the test vectors, relative to the largest output
        double error = 0;
        check(paceline_test(model_, &error));
        return error;
    }
    const paceline_model *get() const noexcept { return model_; }

  private:
    void check_fields(std::size_t in, std::size_t out) const {
        paceline_info x, y;
        check(paceline_input_info(model_, 0, &x));
        check(paceline_output_info(model_, 0, &y));
        if (x.rank != 2 || y.rank != 2 || static_cast<std::int64_t>(in) != x.shape[1] ||
            static_cast<std::int64_t>(out) != y.shape[1])
            throw std::invalid_argument("paceline: one field is needed for each feature of the input and the output");
    }
    paceline_model *model_ = nullptr;
};

}  // namespace paceline
