/* Rows of heads of DIM numbers in half precision in shared memory, as operands of tensor cores, and scores of attention. */
static const u32 CHUNKS = DIM / 8, PITCH = DIM * 2;
static const float LOG2E = 1.4426950408889634f, MASKED = -1e30f;

/* Where eight numbers of a row are in a tile: swizzled, so that those of eight rows lie in different banks. */
DEVICE u32 place(u32 row, u32 chunk) { return row * PITCH + ((chunk ^ (DIM % 64 == 0 ? row & 7 : row >> 1 & 3)) << 4); }

/* Left operands of a warp's rows; right operands with the inputs side by side, and with the outputs side by side. */
DEVICE void left(u32 (&to)[4], u32 tile, u32 row, u32 step)
{
	const u32 lane = threadIdx.x % 32;
	load_matrices(to, tile + place(row + (lane & 15), step * 2 + (lane >> 4)));
}
DEVICE void right(u32 (&to)[4], u32 tile, u32 row, u32 step)
{
	const u32 lane = threadIdx.x % 32;
	load_matrices(to, tile + place(row + (lane & 7) + (lane >> 4) * 8, step * 2 + (lane >> 3 & 1)));
}
DEVICE void right_transposed(u32 (&to)[4], u32 tile, u32 row, u32 columns)
{
	const u32 lane = threadIdx.x % 32;
	load_matrices_transposed(to, tile + place(row + (lane & 15), columns * 2 + (lane >> 4)));
}

DEVICE void store_pair(Element *to, float first, float second) { *(u32 *)to = pack_pair(first, second); }
struct alignas(8) Pair { float first, second; };
DEVICE void store_pair(float *to, float first, float second) { *(Pair *)to = Pair{first, second}; }

/* A score in units of log 2, given the product of a query and a key, and the factor of its derivative. */
DEVICE float scored(float product, float &slope)
{
	float z = product * SCALE;
	slope = 1;
	if (CAPPED) {
		const float t = tanhf(z / CAP);
		z = t * CAP;
		slope = 1 - t * t;
	}
	return z * LOG2E;
}

