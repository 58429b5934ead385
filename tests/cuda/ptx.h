/* Instructions of PTX that kernels of our own are made of (backends/kernels/src/cube/cuda/ptx.cuh has the card's). Addresses of shared memory
 * are bytes from its beginning. What a card does in the background is done where the kernel waits for it: a kernel that waits too little
 * computes with what was there before.
 */
#pragma once

inline uint32_t shared_address(const void *place) { return (uint32_t)((const char *)place - stand_in_block.shared); }

inline void copy_async(uint32_t to, const void *from, bool wanted)
{
	lane &own = *stand_in_lane;
	if (to % 16 || (wanted && (uintptr_t)from % 16))
		stand_in_stop("a copy of 16 bytes is not aligned to 16 bytes");
	if (own.copies == sizeof own.copied / sizeof *own.copied)
		stand_in_stop("a thread has more copies under way than the stand-in keeps");
	own.copied[own.copies++] = {to, wanted ? (const char *)from : nullptr, own.groups};
}
inline void copy_async_commit() { stand_in_lane->groups++; }
template <int LAST> void copy_async_wait()
{
	lane &own = *stand_in_lane;
	unsigned kept = 0;
	for (unsigned i = 0; i < own.copies; i++) {
		const lane::copy &each = own.copied[i];
		if (each.group + LAST >= own.groups)
			own.copied[kept++] = each;
		else if (each.from)
			memcpy(stand_in_block.shared + each.to, each.from, 16);
		else
			memset(stand_in_block.shared + each.to, 0, 16);
	}
	own.copies = kept;
}

inline void stand_in_load_matrices(uint32_t (&to)[4], uint32_t row, bool transposed)
{
	memcpy(stand_in_lane->slot, &row, sizeof row);
	stand_in_wait_for_warp();
	for (unsigned i = 0; i < 4; i++) {
		uint16_t pair[2];
		for (unsigned e = 0; e < 2; e++) {
			unsigned across = stand_in_lane->in_warp % 4 * 2 + e, down = stand_in_lane->in_warp / 4, at;
			memcpy(&at, stand_in_neighbour(i * 8 + (transposed ? across : down)).slot, sizeof at);
			memcpy(&pair[e], stand_in_block.shared + at + (transposed ? down : across) * 2, 2);
		}
		memcpy(&to[i], pair, sizeof pair);
	}
	stand_in_wait_for_warp();
}
inline void load_matrices(uint32_t (&to)[4], uint32_t row) { stand_in_load_matrices(to, row, false); }
inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) { stand_in_load_matrices(to, row, true); }

/* What depends on the type of numbers, which a kernel's text calls Element. */
template <typename T> struct stand_in_of {
	static float half(uint32_t pair, unsigned which)
	{
		T value;
		value.bits = (uint16_t)(pair >> which * 16);
		return value;
	}

	static void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
	{
		struct shown { uint32_t a[4], b[2]; } own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
		memcpy(stand_in_lane->slot, &own, sizeof own);
		stand_in_wait_for_warp();
		for (unsigned e = 0; e < 4; e++) {
			unsigned row = stand_in_lane->in_warp / 4, column = stand_in_lane->in_warp % 4 * 2 + e % 2, low = e / 2;
			for (unsigned k = 0; k < 16; k++) {
				const shown *left = (const shown *)stand_in_neighbour(row * 4 + k % 8 / 2).slot;
				const shown *right = (const shown *)stand_in_neighbour(column * 4 + k % 8 / 2).slot;
				sums[e] += half(left->a[low + k / 8 * 2], k % 2) * half(right->b[k / 8], k % 2);
			}
		}
		stand_in_wait_for_warp();
	}

	static uint32_t pack_pair(float first, float second)
	{
		T low = first, high = second;
		return (uint32_t)low.bits | (uint32_t)high.bits << 16;
	}

	/* A number of a matrix that a descriptor describes: of the `output`-th row or column, the `input`-th of sixteen. */
	static float described(uint64_t descriptor, bool by_inputs, unsigned output, unsigned input)
	{
		unsigned at = (descriptor & 0x3fff) << 4, lead = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
		unsigned pattern = (unsigned)(descriptor >> 62), width = 256 >> pattern;
		if (pattern == 0 || (!by_inputs && pattern != 1))
			stand_in_stop("a descriptor has a pattern that the stand-in does not know");
		if (by_inputs)
			at += output / 8 * stride + output % 8 * width + input * 2;
		else
			at += output / 64 * lead + input / 8 * stride + input % 8 * width + output % 64 * 2;
		at ^= (at >> 7 & (width / 16 - 1)) << 4;
		T value;
		memcpy(&value, stand_in_block.shared + at, sizeof value);
		return value;
	}

	template <bool A_BY_INPUTS, bool B_BY_INPUTS, unsigned SUMS> static void warpgroup_multiply_add(float (&d)[SUMS], uint64_t a, uint64_t b)
	{
		unsigned row = stand_in_lane->thread.x / 32 % 4 * 16 + stand_in_lane->in_warp / 4;
		for (unsigned k = 0; k < 16; k++) {
			float low = described(a, A_BY_INPUTS, row, k), high = described(a, A_BY_INPUTS, row + 8, k);
			for (unsigned i = 0; i < SUMS / 2; i++) {
				float right = described(b, B_BY_INPUTS, i / 2 * 8 + stand_in_lane->in_warp % 4 * 2 + i % 2, k);
				d[i / 2 * 4 + i % 2] += low * right;
				d[i / 2 * 4 + 2 + i % 2] += high * right;
			}
		}
	}
};
#define multiply_add stand_in_of<Element>::multiply_add
#define pack_pair stand_in_of<Element>::pack_pair
#define warpgroup_multiply_add stand_in_of<Element>::template warpgroup_multiply_add

inline float exp2_approx(float x) { return std::exp2(x); }

inline void fence_async_proxy() {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit() {}
inline void warpgroup_wait() {}
