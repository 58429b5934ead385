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
	/* The tile's first position, and the position after the last key. */
	int position, end;
	/* The span of that position: its first row and position, and the position of the next. */
	const int *span, *last;
	int row, start, next_start;

	DEVICE void open()
	{
		row = span[0], start = span[2];
		next_start = span + SPAN_FIELDS < last ? span[SPAN_FIELDS + 2] : end;
	}
	DEVICE void settle()
	{
		while (position >= next_start && span + SPAN_FIELDS < last) {
			span += SPAN_FIELDS;
			open();
		}
	}
	DEVICE KeyTiles(const int *spans, const Block &block, int window)
		: position(max(block.position - window + 1, 0) / (int)OTHERS * (int)OTHERS), end(block.position + block.count),
		  span(spans + block.span * SPAN_FIELDS), last(spans + block.last * SPAN_FIELDS)
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
		if (at >= end)
			return NO_ROW;
		if (at < next_start)
			return at < start ? NO_ROW : (u32)(row + at - start);
		const int *other = span + SPAN_FIELDS;
		while (other + SPAN_FIELDS < last && at >= other[SPAN_FIELDS + 2])
			other += SPAN_FIELDS;
		return (u32)(other[0] + at - other[2]);
	}
};

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
