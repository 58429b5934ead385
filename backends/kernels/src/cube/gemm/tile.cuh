/* Tiles of both matrices in shared memory, 32 inputs at a time, and the copies that fill them.
 *
 * A matrix lies in memory by inputs (the inputs of a row or column of the product side by side) or by outputs (an input of all of them).
 * Its tile is laid out as `wgmma` wants it, which spares `ldmatrix` conflicts of banks as well: by inputs in rows of 64 bytes, swizzled by
 * the 64-byte pattern; by outputs in blocks of 64 of them, an input in a row of 128 bytes, swizzled by the 128-byte pattern.
 */
static const u32 INPUTS = 32, CHUNK = 8, BLOCK_BYTES = INPUTS * 128;

/* The place of the chunk-th eight inputs of a row or column. */
DEVICE u32 place_by_inputs(u32 output, u32 chunk) { return output * (INPUTS * 2) + ((chunk ^ (output >> 1 & 3)) << 4); }
/* The place of an input of the chunk-th eight outputs. */
DEVICE u32 place_by_outputs(u32 input, u32 chunk) { return (chunk >> 3) * BLOCK_BYTES + input * 128 + (((chunk & 7) ^ (input & 7)) << 4); }

/* A thread's share of the copies of a tile of SIDE rows or columns. */
template <u32 SIDE, bool BY_INPUTS> struct Copies {
	static const u32 EACH = SIDE * INPUTS / CHUNK / THREADS, ACROSS = (BY_INPUTS ? INPUTS : SIDE) / CHUNK, DOWN = THREADS / ACROSS;
	u64 index, pitch;
	u32 place;
	/* What is left of outputs and inputs, counted from this thread's first. */
	int outputs, inputs;

	DEVICE Copies(u64 first, u64 all, u64 first_input, u64 end, u64 pitch) : pitch(pitch)
	{
		const u32 chunk = threadIdx.x % ACROSS, row = threadIdx.x / ACROSS;
		const u32 output = BY_INPUTS ? row : chunk * CHUNK, input = BY_INPUTS ? chunk * CHUNK : row;
		place = BY_INPUTS ? place_by_inputs(row, chunk) : place_by_outputs(row, chunk);
		index = BY_INPUTS ? (first + output) * pitch + first_input + input : (first_input + input) * pitch + first + output;
		outputs = (int)min(all - first, (u64)SIDE) - (int)output;
		inputs = (int)(end - first_input) - (int)input;
	}
	/* Where the i-th copy comes from, and whether there is something. */
	DEVICE bool wanted(u32 i) const { return BY_INPUTS ? (int)(i * DOWN) < outputs && inputs > 0 : outputs > 0 && (int)(i * DOWN) < inputs; }
	DEVICE u64 from(u32 i) const { return wanted(i) ? index + i * DOWN * pitch : 0; }
	DEVICE u32 to(u32 i) const { return place + i * DOWN * (BY_INPUTS ? INPUTS * 2 : 128); }
	/* On to the next inputs. */
	DEVICE void advance()
	{
		index += BY_INPUTS ? (u64)INPUTS : INPUTS * pitch;
		inputs -= (int)INPUTS;
	}
};
