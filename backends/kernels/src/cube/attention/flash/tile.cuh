/* Tiles of rows of heads in shared memory, and products of them on tensor cores, of a block of threads with ROWS rows of one side, WARP_ROWS of
 * them a warp, and OTHERS of the other side at a time. Scores, probabilities and their gradients stay in registers: an accumulator of 16 x 8
 * numbers is half of a left operand of 16 x 16.
 *
 * The launcher writes in front of this the constants that a kernel is compiled for.
 */
static const u32 TILES = WARP_ROWS / 16, THREADS = ROWS / WARP_ROWS * 32, TILE_BYTES = OTHERS * PITCH;
/* Where a tile has no row. */
static const u32 NO_ROW = ~0u;

/* The rows of a tile that lie at one distance in memory. All count heads. */
struct Rows {
	u32 first, pitch, count;
	DEVICE u32 operator()(u32 row) const { return row < count ? first + row * pitch : NO_ROW; }
};

/* Copies N rows of heads in the background, `rows(i)` the i-th; those that are not there are zero. */
template <u32 N, typename Find, typename Copy> DEVICE void stage(u32 to, Find rows, Copy copy)
{
#pragma unroll
	for (u32 i = 0; i < N * CHUNKS / THREADS; i++) {
		const u32 index = threadIdx.x + i * THREADS, chunk = index % CHUNKS, row = rows(index / CHUNKS);
		copy(to + place(index / CHUNKS, chunk), row == NO_ROW ? 0 : (u64)row * DIM + chunk * 8, row != NO_ROW);
	}
}

template <u32 N> DEVICE void clear(float (&sums)[TILES][N][4])
{
#pragma unroll
	for (u32 i = 0; i < TILES; i++)
#pragma unroll
		for (u32 j = 0; j < N; j++)
#pragma unroll
			for (u32 e = 0; e < 4; e++)
				sums[i][j][e] = 0;
}

/* sums = rows of this warp · rows of a tile, transposed */
DEVICE void products(float (&sums)[TILES][OTHERS / 8][4], u32 rows, u32 tile)
{
	const u32 first = threadIdx.x / 32 * WARP_ROWS;
	clear(sums);
#pragma unroll
	for (u32 step = 0; step < DIM / 16; step++) {
		u32 a[TILES][4];
#pragma unroll
		for (u32 i = 0; i < TILES; i++)
			left(a[i], rows, first + i * 16, step);
#pragma unroll
		for (u32 j = 0; j < OTHERS / 16; j++) {
			u32 b[4];
			right(b, tile, j * 16, step);
#pragma unroll
			for (u32 i = 0; i < TILES; i++) {
				multiply_add(sums[i][j * 2], a[i], b[0], b[1]);
				multiply_add(sums[i][j * 2 + 1], a[i], b[2], b[3]);
			}
		}
	}
}

/* sums += weights · rows of a tile */
DEVICE void add_weighted(float (&sums)[TILES][DIM / 8][4], const float (&weights)[TILES][OTHERS / 8][4], u32 tile)
{
#pragma unroll
	for (u32 k = 0; k < OTHERS / 16; k++) {
		u32 a[TILES][4];
#pragma unroll
		for (u32 i = 0; i < TILES; i++)
#pragma unroll
			for (u32 half = 0; half < 2; half++) {
				const float(&w)[4] = weights[i][k * 2 + half];
				a[i][half * 2] = pack_pair(w[0], w[1]);
				a[i][half * 2 + 1] = pack_pair(w[2], w[3]);
			}
#pragma unroll
		for (u32 j = 0; j < DIM / 16; j++) {
			u32 b[4];
			right_transposed(b, tile, k * 16, j);
#pragma unroll
			for (u32 i = 0; i < TILES; i++) {
				multiply_add(sums[i][j * 2], a[i], b[0], b[1]);
				multiply_add(sums[i][j * 2 + 1], a[i], b[2], b[3]);
			}
		}
	}
}
