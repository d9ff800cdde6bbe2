// Same model as scale.c.
#include <cmath>
#include <iostream>
#include <paceline.hpp>

int main(int, char **arguments) {
    const paceline::Model first(arguments[1]);
    paceline::Model model(arguments[1]);
    paceline::Model moved(std::move(model));
    const std::vector<double> x{1, 2, 3, 4, 5, 6};
    std::vector<double> y(4), z(4);
    moved.run(2, x.data(), y.data());
    // The same by columns: element (i, k) at columns[i + 2 k].
    const std::vector<double> columns{1, 4, 2, 5, 3, 6};
    moved.run(paceline::Array<const double>(columns.data(), {2, 3}, {1, 2}), paceline::Array<double>(z.data(), {2, 2}));
    if (y != z || std::abs(y[0] - 24) > 1e-12 || std::abs(y[3] - 52) > 1e-12) return 1;
    moved.run_fields(2, {columns.data(), columns.data() + 2, columns.data() + 4}, {z.data(), z.data() + 2});
    if (std::abs(z[0] - y[0]) > 1e-12 || std::abs(z[3] - y[3]) > 1e-12) return 2;
    if (moved.inputs().at(0).rank != 2 || moved.test() > 1e-13 || moved.backend() != "builtin") return 3;
    try {
        moved.run(paceline::Array<const double>(x.data(), {3, 2}), paceline::Array<double>(z.data(), {2, 2}));
        return 4;
    } catch (const paceline::Error &error) {
        if (error.code() != PACELINE_ERROR_SHAPE) return 5;
    }
    try {
        paceline::Model("/absent.paceline");
        return 6;
    } catch (const paceline::Error &error) {
        if (error.code() != PACELINE_ERROR_FILE) return 7;
    }
    std::cout << "right\n";
}
