/* MPI's own sum of 64 MiB of f32 over all ranks: milliseconds of each of some turns, the slowest rank's, a line each. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { VALUES = 16 << 20, TURNS = 15 };

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    float *own = malloc(VALUES * sizeof *own), *sum = malloc(VALUES * sizeof *sum);
    for (int i = 0; i < VALUES; i++) own[i] = (float)(i % 97) + (float)rank;
    for (int turn = 0; turn < TURNS; turn++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        MPI_Allreduce(own, sum, VALUES, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double took = MPI_Wtime() - start, slowest;
        MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) printf("%.3f\n", 1e3 * slowest);
    }
    free(own);
    free(sum);
    MPI_Finalize();
    return 0;
}
