/* Causal attention of packed sequences on tensor cores by mma.sync (FlashAttention-2; Dao, 2023), forward and backward: blocks of rows and what
 * they see. No two blocks of threads write the same number, so results are the same in every run.
 */
struct info_st {
	u64 static_meta[BUFFERS];
	/* Where blocks and spans begin in `table`; query heads, query heads of a key head, window; parts of a group's heads, rows of all. */
	u64 blocks, spans, heads, group, window, parts, rows;
};

static const u32 BLOCK_FIELDS = 5, SPAN_FIELDS = 3;

/* A block's first row, the number of its rows, the position of the first, and its spans. */
struct Block {
	int from, count, position, span, last;
	DEVICE Block(const int *fields) : from(fields[0]), count(fields[1] - fields[0]), position(fields[2]), span(fields[3]), last(fields[4]) {}
};

/* The keys that a block of queries sees, in tiles that begin at multiples of OTHERS positions, whatever spans they are in: so the order of a
 * row's sums depends on its position alone, not on where blocks and shared prefixes end.
 */
struct KeyTiles {
	const int *const spans;
	/* The tile's first position, and the position after the last key. */
	int position;
	const int end;
	/* The span of that position, and the one behind the last; what is added to a position of the span for its row, the first position, and the
	 * next span's. */
	int span;
	const int last;
	int shift, start, next_start;

	DEVICE int field(int of, int which) const { return spans[of * (int)SPAN_FIELDS + which]; }
	DEVICE void open()
	{
		start = field(span, 2);
		shift = field(span, 0) - start;
		next_start = span + 1 < last ? field(span + 1, 2) : end;
	}
	DEVICE void settle()
	{
		while (position >= next_start && span + 1 < last) {
			span++;
			open();
		}
	}
	DEVICE KeyTiles(const int *spans, const Block &block, int window)
		: spans(spans), position(max(block.position - window + 1, 0) / (int)OTHERS * (int)OTHERS), end(block.position + block.count),
		  span(block.span), last(block.last)
	{
		open();
		settle();
	}
	DEVICE bool any() const { return position < end; }
	DEVICE void advance()
	{
		position += OTHERS;
		settle();
	}
	/* The row of the tile's i-th position; NO_ROW where there is none, as behind the last key and before the first that is known. */
	DEVICE u32 find(u32 i) const
	{
		const int at = position + (int)i;
		if (at < next_start)
			return at < start ? NO_ROW : (u32)(at + shift);
		if (at >= end)
			return NO_ROW;
		int other = span + 1;
		while (other + 1 < last && at >= field(other + 1, 2))
			other++;
		return (u32)(field(other, 0) + at - field(other, 2));
	}
};

/* Stages a tile's rows of a key head by `copy`, as `stage` does. */
template <class Copy> DEVICE void stage_tile(u32 to, const KeyTiles &tile, u32 kv_heads, u32 kv_head, Copy copy)
{
	auto rows = [&](u32 i) {
		const u32 row = tile.find(i);
		return row == NO_ROW ? NO_ROW : row * kv_heads + kv_head;
	};
	stage<OTHERS>(to, rows, copy);
}

/* The queries that see a block of keys, in tiles of the rows of a span. */
struct QueryTiles {
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
			row = max(first, block.position - shift);
			end = min(after, block.position + block.count + window - 1 - shift);
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
