/* Elementwise reduction of the vectors of all ranks, in rank order. 16-bit floating-point numbers
   are reduced in float32 and rounded once; integers wrap around; a minimum or maximum with a NaN is
   NaN. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64, KINDS };
enum { SUM, MEAN, PRODUCT, MIN, MAX };

#define BLOCK 8192 /* bytes: a block stays in the L1 cache while it is reduced */

/* Use the widest vector instructions of the CPU at run time, also in a generic build. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(PLAIN)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define WIDE
#endif

typedef void Fold(void *restrict acc, const void *restrict more, size_t count);

#define FOLD(NAME, T, EXPRESSION)                                                   \
    WIDE static void NAME(void *restrict acc, const void *restrict more, size_t n) { \
        T *restrict to = acc;                                                       \
        const T *restrict from = more;                                              \
        for (size_t i = 0; i < n; i++) {                                            \
            T a = to[i], b = from[i];                                               \
            to[i] = (T)(EXPRESSION);                                                \
        }                                                                           \
    }
#define FOLDS(NAME, T, W)                             \
    FOLD(NAME##_sum, T, (W)a + (W)b)                  \
    FOLD(NAME##_product, T, (W)a * (W)b)              \
    FOLD(NAME##_min, T, (b < a) | (b != b) ? b : a)   \
    FOLD(NAME##_max, T, (b > a) | (b != b) ? b : a)

FOLDS(f32, float, float)
FOLDS(f64, double, double)
FOLDS(i8, int8_t, uint32_t)
FOLDS(u8, uint8_t, uint32_t)
FOLDS(i16, int16_t, uint32_t)
FOLDS(i32, int32_t, uint32_t)
FOLDS(i64, int64_t, uint64_t)

static float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

WIDE static void widen_f16(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)(from[i] & 0x7fff) << 13, sign = (uint32_t)(from[i] & 0x8000) << 16;
        uint32_t wide = as_bits(as_float(bits) * 0x1p112f); /* exponent biases differ by 112 */
        to[i] = as_float(wide | sign | (bits >= 0x0f800000 ? 0x7f800000 : 0)); /* inf, NaN */
    }
}

WIDE static void narrow_f16(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) { /* round to nearest, ties to even */
        uint32_t bits = as_bits(from[i]), sign = bits >> 16 & 0x8000;
        bits &= 0x7fffffff;
        uint32_t normal = (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13;
        uint32_t small = as_bits(as_float(bits) + 0.5f) - 0x3f000000; /* below 2^-14 */
        uint32_t large = bits > 0x7f800000 ? 0x7e00 : 0x7c00;         /* from 2^16 on */
        /* Masks, as the compiler does not vectorize a loop with branches. */
        uint32_t is_small = -(uint32_t)(bits < 0x38800000);
        uint32_t is_large = -(uint32_t)(bits >= 0x47800000);
        uint32_t found = (small & is_small) | (large & is_large) | (normal & ~(is_small | is_large));
        to[i] = (uint16_t)(found | sign);
    }
}

WIDE static void widen_bf16(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = as_float((uint32_t)from[i] << 16);
}

WIDE static void narrow_bf16(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(from[i]);
        uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : near);
    }
}

WIDE static void divide_f32(float *x, float by, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] /= by;
}

WIDE static void divide_f64(double *x, double by, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] /= by;
}

/* Set the floating-point mode of this thread to the default, in which subnormals are not flushed to
   zero (torch.set_flush_denormal) and results are rounded to nearest: float16's subnormals are
   converted by way of float32's, and ranks with different modes have to get the same bits. Return
   the previous mode for restore_mode. */
static uint64_t default_mode(void) {
#if defined(__x86_64__)
    uint64_t mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(0x1f80);
    return mode;
#elif defined(__aarch64__)
    uint64_t mode, none = 0;
    __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, %1" : "=&r"(mode) : "r"(none) : "memory");
    return mode;
#else
    return 0;
#endif
}

static void restore_mode(uint64_t mode) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
#else
    (void)mode;
#endif
}

static const size_t SIZES[KINDS] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
#define ROW(NAME) {NAME##_sum, NAME##_sum, NAME##_product, NAME##_min, NAME##_max}
static Fold *const FOLD_OF[KINDS][5] = {ROW(f32), ROW(f64), ROW(f32), ROW(f32), ROW(i8),
                                        ROW(u8),  ROW(i16), ROW(i32), ROW(i64)};

static void widen(int kind, void *to, const void *from, size_t n) {
    if (kind == F16)
        widen_f16(to, from, n);
    else if (kind == BF16)
        widen_bf16(to, from, n);
    else
        memcpy(to, from, n * SIZES[kind]);
}

static void narrow(int kind, void *to, const void *from, size_t n) {
    if (kind == F16)
        narrow_f16(to, from, n);
    else if (kind == BF16)
        narrow_bf16(to, from, n);
    else
        memcpy(to, from, n * SIZES[kind]);
}

/* Reduce vectors. from: one vector of ``bytes`` per rank; by: divisor of a mean; to, also (unless
   NULL): destinations of the result. ``to`` may be one of ``from``, because each block is reduced
   in a separate buffer. */
static void combine(int kind, int how, const char **from, int size, double by, char *to,
                    char *also, size_t bytes) {
    uint64_t mode = default_mode();
    _Alignas(64) char acc[BLOCK], more[BLOCK];
    Fold *fold = FOLD_OF[kind][how];
    int half = kind == F16 || kind == BF16;
    size_t each = BLOCK / (half ? sizeof(float) : SIZES[kind]) * SIZES[kind];
    for (size_t at = 0; at < bytes; at += each) {
        size_t n = (bytes - at < each ? bytes - at : each) / SIZES[kind];
        widen(kind, acc, from[0] + at, n);
        for (int q = 1; q < size; q++) {
            if (half) widen(kind, more, from[q] + at, n);
            fold(acc, half ? more : from[q] + at, n);
        }
        if (how == MEAN && kind == F64)
            divide_f64((double *)acc, by, n);
        else if (how == MEAN)
            divide_f32((float *)acc, (float)by, n);
        narrow(kind, to + at, acc, n);
        if (also) memcpy(also + at, to + at, n * SIZES[kind]);
    }
    restore_mode(mode);
}
