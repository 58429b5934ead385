/* How a block runs: a thread of it at a time, each on a stack of its own, until it waits for the others or ends. */
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdlib>
#include <cstring>

#include "kernel.h"

static const int MOST_SHARED = 232448;
static const unsigned MOST_THREADS = 1024;
static const size_t STACK = 256 << 10, PAGE = 4096;
enum state { READY, WAITS_FOR_WARP, WAITS_FOR_BLOCK, ENDED };

/* What blocks are run with, one after the other. A fiber runs one thread of a block after the other, on a stack of its own. */
struct machine {
	lane lanes[MOST_THREADS];
	state states[MOST_THREADS];
	jmp_buf places[MOST_THREADS], scheduler;
	ucontext_t fresh;
	bool begun[MOST_THREADS];
	char *stacks;
	alignas(1024) char shared[MOST_SHARED];
	void (*kernel)(void *);
	void *arguments;
};
static machine *own;
lane *stand_in_lane;
block stand_in_block;

static void rest(state why)
{
	unsigned index = stand_in_lane - own->lanes;
	own->states[index] = why;
	if (!_setjmp(own->places[index]))
		_longjmp(own->scheduler, 1);
}

extern "C" void stand_in_wait_for_block() { rest(WAITS_FOR_BLOCK); }
extern "C" void stand_in_wait_for_warp() { rest(WAITS_FOR_WARP); }

static void fiber()
{
	for (;;) {
		own->kernel(own->arguments);
		stand_in_lane->ended = true;
		rest(ENDED);
	}
}

static void resume(unsigned index)
{
	stand_in_lane = &own->lanes[index];
	if (_setjmp(own->scheduler))
		return;
	if (own->begun[index])
		_longjmp(own->places[index], 1);
	own->begun[index] = true;
	getcontext(&own->fresh);
	own->fresh.uc_stack.ss_sp = own->stacks + index * STACK + PAGE;
	own->fresh.uc_stack.ss_size = STACK - PAGE;
	own->fresh.uc_link = nullptr;
	makecontext(&own->fresh, fiber, 0);
	setcontext(&own->fresh);
}

/* Lets threads go on that waited for each other; whether any may. */
static bool release(unsigned threads)
{
	bool any = false, all = true;
	for (unsigned first = 0; first < threads; first += 32) {
		unsigned last = first + 32 < threads ? first + 32 : threads, at_warp = 0, at_block = 0;
		for (unsigned index = first; index < last; index++) {
			at_warp += own->states[index] == WAITS_FOR_WARP;
			at_block += own->states[index] == WAITS_FOR_BLOCK;
		}
		if (at_warp && !at_block) {
			any = true;
			for (unsigned index = first; index < last; index++)
				if (own->states[index] == WAITS_FOR_WARP)
					own->states[index] = READY;
		}
		all &= !at_warp;
	}
	for (unsigned index = 0; all && index < threads; index++)
		if (own->states[index] == WAITS_FOR_BLOCK) {
			own->states[index] = READY;
			any = true;
		}
	return any;
}

/* The place of the `count`-th of so many blocks or threads. */
static uint64_t place(uint64_t count, uint64_t all)
{
	static const char *const asked = getenv("STAND_IN_ORDER");
	static const bool backward = asked && !strcmp(asked, "backward");
	return backward ? all - 1 - count : count;
}

/* One block; whether it came to its end. */
static bool run_block(unsigned threads, bool waits)
{
	for (unsigned index = 0; index < threads; index++) {
		lane &each = own->lanes[index];
		position size = stand_in_block.size;
		each.thread = {index % size.x, index / size.x % size.y, index / (size.x * size.y)};
		each.in_warp = index % 32;
		each.ended = false;
		each.copies = each.groups = 0;
		own->states[index] = READY;
	}
	if (!waits) {
		for (unsigned index = 0; index < threads; index++) {
			stand_in_lane = &own->lanes[place(index, threads)];
			own->kernel(own->arguments);
		}
		return true;
	}
	do {
		for (unsigned count = 0; count < threads; count++) {
			unsigned index = place(count, threads);
			if (own->states[index] == READY)
				resume(index);
		}
	} while (release(threads));
	for (unsigned index = 0; index < threads; index++)
		if (own->states[index] != ENDED)
			return false;
	return true;
}

static void prepare_machine()
{
	if (own)
		return;
	own = new machine();
	own->stacks = (char *)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	for (unsigned index = 0; index < MOST_THREADS; index++)
		mprotect(own->stacks + index * STACK, PAGE, PROT_NONE);
}
