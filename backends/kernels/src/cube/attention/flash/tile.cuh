/* Causal attention of packed sequences on tensor cores by mma.sync (FlashAttention-2; Dao, 2023), forward and backward. No two blocks of
 * threads write the same number, so results are the same in every run.
 *
 * A block of threads has ROWS rows of one head, WARP_ROWS of them a warp, in shared memory, and iterates over tiles of OTHERS rows of the
 * other side (keys and values of queries, or queries and output gradients of keys), of which the next is copied meanwhile. Scores,
 * probabilities and their gradients stay in registers: an accumulator of 16 x 8 numbers is half of a left operand of 16 x 16.
 *
 * The launcher writes in front of this the constants that a kernel is compiled for.
 */
struct info_st {
	u64 static_meta[BUFFERS];
	/* Where blocks and spans begin in `table`; query heads, query heads of a key head, window; parts of a group's heads, rows of all. */
	u64 blocks, spans, heads, group, window, parts, rows;
};

static const u32 TILES = WARP_ROWS / 16, THREADS = ROWS / WARP_ROWS * 32, TILE_BYTES = OTHERS * PITCH;
static const u32 BLOCK_FIELDS = 5, SPAN_FIELDS = 3;

/* Copies N rows of a head in the background, of which there are `count`; the others are zero. `first` and `pitch` count heads. */
template <u32 N, typename Copy> DEVICE void stage(u32 to, u32 first, u32 pitch, u32 count, Copy copy)
{
#pragma unroll
	for (u32 i = 0; i < N * CHUNKS / THREADS; i++) {
		const u32 index = threadIdx.x + i * THREADS, row = index / CHUNKS, chunk = index % CHUNKS;
		copy(to + place(row, chunk), row < count ? (u64)(first + row * pitch) * DIM + chunk * 8 : 0, row < count);
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

/* A block's first row, the number of its rows, the position of the first, and its spans. */
struct Block {
	int from, count, position, span, last;
	DEVICE Block(const int *fields) : from(fields[0]), count(fields[1] - fields[0]), position(fields[2]), span(fields[3]), last(fields[4]) {}
};

/* The tiles of a block, one after the other: its spans' rows that matter to it. */
template <bool OF_KEYS> struct Tiles {
	/* The tile's first row, the row after the span's last that matters, and the difference of positions and rows. */
	int row, end, shift;
	int span;

	/* Goes on to the next tile that has rows, from `span` on; false behind the last. */
	DEVICE bool settle(const int *spans, const Block &block, int window)
	{
		while (row >= end) {
			if (span == block.last)
				return false;
			const int first = spans[span * SPAN_FIELDS], after = spans[span * SPAN_FIELDS + 1];
			shift = spans[span * SPAN_FIELDS + 2] - first;
			span++;
			/* queries that see any of the block's keys, or keys that any of its queries sees */
			const int from = OF_KEYS ? block.position : block.position - window + 1;
			const int to = block.position + block.count + (OF_KEYS ? window - 1 : 0);
			row = max(first, from - shift);
			end = min(after, to - shift);
		}
		return true;
	}
	DEVICE bool begin(const int *spans, const Block &block, int window)
	{
		row = end = 0;
		span = block.span;
		return settle(spans, block, window);
	}
	DEVICE bool next(const int *spans, const Block &block, int window)
	{
		row += OTHERS;
		return settle(spans, block, window);
	}
};

/* True if a query sees a key, given their positions. */
DEVICE bool visible(int query, int key, int window) { return key <= query && query - key < window; }
