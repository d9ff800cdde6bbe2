// Water displaces oil in a ring of rock, with a learned flux: C++17 and MPI.
//
//   mpirun -n 2 run/transport run/water_flux.paceline 10000
//
// du/dt + df(u, r)/dx = 0 for the share of water u and the ratio r of the viscosities of oil and water, by
// upwind differences. A second ring is computed with the formula of f, for comparison.
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <paceline.hpp>
#include <string>
#include <vector>

namespace {

constexpr int cells = 256;  // of all ranks
constexpr double pi = 3.14159265358979323846, dx = 1.0 / cells, dt = 0.25 * dx;

struct Ranks {
    int rank = 0, count = 1;
    Ranks() {
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &count);
    }
    int left() const { return (rank + count - 1) % count; }
    int right() const { return (rank + 1) % count; }
    double reduce(double value, MPI_Op operation) const {
        MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, operation, MPI_COMM_WORLD);
        return value;
    }
};

// Same as in closures.py.
double formula(double water, double ratio) {
    return water * water / (water * water + (1 - water) * (1 - water) / ratio);
}

// One step. compute_flux(flux) stores the flux through the right face of each cell of this rank. One rank
// computes each flux, and its neighbour gets it: water is then conserved with any flux.
template <class ComputeFlux>
double advance(const Ranks &ranks, std::vector<double> &u, std::vector<double> &flux, const ComputeFlux &compute_flux) {
    const double begin = MPI_Wtime();
    compute_flux(flux.data() + 1);
    MPI_Sendrecv(&flux.back(), 1, MPI_DOUBLE, ranks.right(), 0, &flux.front(), 1, MPI_DOUBLE, ranks.left(), 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    for (std::size_t i = 0; i < u.size(); i++) u[i] -= dt / dx * (flux[i + 1] - flux[i]);
    return MPI_Wtime() - begin;
}

void solve(const std::string &file, long steps) {
    const Ranks ranks;
    if (cells % ranks.count) throw std::invalid_argument("the number of ranks must divide 256");
    const std::size_t n = cells / ranks.count;
    const paceline::Model model(file);
    std::vector<double> learned(n), exact(n), ratio(n), flux(n + 1);
    for (std::size_t i = 0; i < n; i++) {
        const double x = (ranks.rank * n + i + 0.5) * dx;
        learned[i] = exact[i] = std::abs(x - 0.5) < 0.2 ? 0.8 : 0.2;
        ratio[i] = 1.5 + std::sin(2 * pi * x);
    }
    const auto total = [&](const std::vector<double> &u) {
        double sum = 0;
        for (double one : u) sum += one;
        return ranks.reduce(sum, MPI_SUM);
    };
    const double at_start = total(exact);
    double seconds[2] = {0, 0};
    if (ranks.rank == 0) std::puts("step,water_learned,water_exact,mean_difference");
    for (long step = 1; step <= steps; step++) {
        // The model has inputs [batch, 2]; the fields of the solver lie apart.
        seconds[0] += advance(ranks, learned, flux, [&](double *out) {
            model.run_fields(static_cast<std::int64_t>(n), {learned.data(), ratio.data()}, {out});
        });
        seconds[1] += advance(ranks, exact, flux, [&](double *out) {
            for (std::size_t i = 0; i < n; i++) out[i] = formula(exact[i], ratio[i]);
        });
        if (step % std::max(1L, steps / 50)) continue;
        double difference = 0;
        for (std::size_t i = 0; i < n; i++) difference += std::abs(learned[i] - exact[i]) / cells;
        difference = ranks.reduce(difference, MPI_SUM);
        const double changes[2] = {total(learned) / at_start - 1, total(exact) / at_start - 1};
        if (ranks.rank == 0) std::printf("%ld,%.14e,%.14e,%.14e\n", step, changes[0], changes[1], difference);
    }
    if (ranks.rank == 0)
        std::printf("# time of a step, learned and exact: %.2f %.2f us\n", 1e6 * seconds[0] / static_cast<double>(steps),
                    1e6 * seconds[1] / static_cast<double>(steps));
}

}  // namespace

int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    try {
        if (count < 2) throw std::invalid_argument("usage: transport MODEL [STEPS]");
        solve(arguments[1], count > 2 ? std::stol(arguments[2]) : 10000);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "transport: %s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
}
