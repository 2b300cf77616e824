// __nv_bfloat16 and its functions on a CPU, written here because NVIDIA's header is not everywhere.
// Included by simt.hpp.
//
// Every conversion and operator rounds once, to nearest, ties to even; a NaN becomes 0x7FFF. Sums,
// products and quotients may go through float: it has more than twice the bits, so that the second
// rounding never differs. Conversions from double and from long integers go to float with the last
// bit "sticky" (round to odd) first, for the same reason.
#pragma once

namespace simt {

inline unsigned short bf16_bits(float value) {
    unsigned bits = bit_cast<unsigned>(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
    return (unsigned short)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline float bf16_float(unsigned short bits) { return bit_cast<float>(unsigned(bits) << 16); }

// The float next to `value` towards zero, with its last bit set if anything was cut off.
inline float round_to_odd(double value) {
    float near = float(value);
    if (double(near) == value || value != value) return near;
    unsigned bits = bit_cast<unsigned>(near);
    if (fabs(double(near)) > fabs(value)) bits -= 1;
    return bit_cast<float>(bits | 1u);
}

template <class I>
inline double integer_to_odd(I value) {
    double near = double(value);
    // compared in 128 bits: the double may be one past the integer type's range
    __int128 rounded = __int128(near), exact = __int128(value);
    if (rounded == exact) return near;
    uint64_t bits = bit_cast<uint64_t>(near);
    bool away = near < 0 ? rounded < exact : rounded > exact;
    if (away) bits -= 1;
    return bit_cast<double>(bits | 1u);
}

}  // namespace simt

struct __nv_bfloat16_raw {
    unsigned short x;
};

struct __nv_bfloat16 {
    unsigned short __x;

    __nv_bfloat16() = default;  // leaves shared memory's poison alone
    __nv_bfloat16(const __nv_bfloat16_raw &raw) : __x(raw.x) {}
    __nv_bfloat16(float v) : __x(simt::bf16_bits(v)) {}
    __nv_bfloat16(double v) : __x(simt::bf16_bits(simt::round_to_odd(v))) {}
#define SIMT_FROM(I) \
    __nv_bfloat16(I v) : __x(simt::bf16_bits(simt::round_to_odd(simt::integer_to_odd(v)))) {}
#define SIMT_TO(I) \
    operator I() const { return simt::saturate<I>(simt::bf16_float(__x)); }
    SIMT_FROM(short) SIMT_FROM(unsigned short) SIMT_FROM(int) SIMT_FROM(unsigned) SIMT_FROM(long)
    SIMT_FROM(unsigned long) SIMT_FROM(long long) SIMT_FROM(unsigned long long)
    operator float() const { return simt::bf16_float(__x); }
    operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{__x}; }
    operator bool() const { return (__x & 0x7FFF) != 0; }
    SIMT_TO(char) SIMT_TO(signed char) SIMT_TO(unsigned char) SIMT_TO(short) SIMT_TO(unsigned short)
    SIMT_TO(int) SIMT_TO(unsigned) SIMT_TO(long) SIMT_TO(unsigned long) SIMT_TO(long long)
    SIMT_TO(unsigned long long)
#undef SIMT_FROM
#undef SIMT_TO
};
typedef __nv_bfloat16 nv_bfloat16;

struct __attribute__((aligned(4))) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(const __nv_bfloat16 &a, const __nv_bfloat16 &b) : x(a), y(b) {}
};
typedef __nv_bfloat162 nv_bfloat162;

// --- conversions ----------------------------------------------------------------------------------

inline float __bfloat162float(__nv_bfloat16 a) { return simt::bf16_float(a.__x); }
inline __nv_bfloat16 __float2bfloat16(float a) { return __nv_bfloat16(a); }
inline __nv_bfloat16 __float2bfloat16_rn(float a) { return __nv_bfloat16(a); }
inline __nv_bfloat16 __double2bfloat16(double a) { return __nv_bfloat16(a); }
inline __nv_bfloat16 __float2bfloat16_rz(float a) {
    unsigned bits = __float_as_uint(a);
    return __nv_bfloat16_raw{(unsigned short)(a != a ? 0x7FFF : bits >> 16)};
}
inline __nv_bfloat16 __float2bfloat16_rd(float a) {
    unsigned bits = __float_as_uint(a);
    if (a != a || !(bits & 0xFFFFu) || !(bits >> 31)) return __float2bfloat16_rz(a);
    return __nv_bfloat16_raw{(unsigned short)((bits >> 16) + 1)};
}
inline __nv_bfloat16 __float2bfloat16_ru(float a) {
    unsigned bits = __float_as_uint(a);
    if (a != a || !(bits & 0xFFFFu) || bits >> 31) return __float2bfloat16_rz(a);
    return __nv_bfloat16_raw{(unsigned short)((bits >> 16) + 1)};
}
#define SIMT_BF16_INTEGER(word, I)                                                        \
    inline __nv_bfloat16 __##word##2bfloat16_rn(I a) { return __nv_bfloat16(a); }         \
    inline I __bfloat162##word##_rz(__nv_bfloat16 a) { return (I)a; }                     \
    inline I __bfloat162##word##_rn(__nv_bfloat16 a) {                                    \
        return simt::saturate<I>(nearbyintf(float(a)));                                   \
    }
SIMT_BF16_INTEGER(short, short)
SIMT_BF16_INTEGER(ushort, unsigned short)
SIMT_BF16_INTEGER(int, int)
SIMT_BF16_INTEGER(uint, unsigned)
SIMT_BF16_INTEGER(ll, long long)
SIMT_BF16_INTEGER(ull, unsigned long long)
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.__x; }
inline short __bfloat16_as_short(__nv_bfloat16 a) { return short(a.__x); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short a) { return __nv_bfloat16_raw{a}; }
inline __nv_bfloat16 __short_as_bfloat16(short a) {
    return __nv_bfloat16_raw{(unsigned short)a};
}
#define CUDART_INF_BF16 __ushort_as_bfloat16((unsigned short)0x7F80U)
#define CUDART_NAN_BF16 __ushort_as_bfloat16((unsigned short)0x7FFFU)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16((unsigned short)0x0000U)
#define CUDART_ONE_BF16 __ushort_as_bfloat16((unsigned short)0x3F80U)

// --- arithmetic -----------------------------------------------------------------------------------

#define SIMT_BF16_BINARY(op, name)                                                                   \
    inline __nv_bfloat16 operator op(const __nv_bfloat16 &a, const __nv_bfloat16 &b) {               \
        return __nv_bfloat16(float(a) op float(b));                                                  \
    }                                                                                                \
    inline __nv_bfloat16 &operator op##=(__nv_bfloat16 &a, const __nv_bfloat16 &b) {                 \
        return a = a op b;                                                                           \
    }                                                                                                \
    inline __nv_bfloat16 name(__nv_bfloat16 a, __nv_bfloat16 b) { return a op b; }                   \
    inline __nv_bfloat16 name##_rn(__nv_bfloat16 a, __nv_bfloat16 b) { return a op b; }              \
    inline __nv_bfloat162 operator op(const __nv_bfloat162 &a, const __nv_bfloat162 &b) {            \
        return __nv_bfloat162(a.x op b.x, a.y op b.y);                                               \
    }                                                                                                \
    inline __nv_bfloat162 &operator op##=(__nv_bfloat162 &a, const __nv_bfloat162 &b) {              \
        return a = a op b;                                                                           \
    }
SIMT_BF16_BINARY(+, __hadd)
SIMT_BF16_BINARY(-, __hsub)
SIMT_BF16_BINARY(*, __hmul)
SIMT_BF16_BINARY(/, __hdiv)
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return a + b; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return a - b; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return a * b; }
inline __nv_bfloat162 __h2div(__nv_bfloat162 a, __nv_bfloat162 b) { return a / b; }

#define SIMT_BF16_COMPARE(op, name)                                                         \
    inline bool operator op(const __nv_bfloat16 &a, const __nv_bfloat16 &b) {               \
        return float(a) op float(b);                                                        \
    }                                                                                       \
    inline bool name(__nv_bfloat16 a, __nv_bfloat16 b) { return a op b; }
SIMT_BF16_COMPARE(==, __heq)
SIMT_BF16_COMPARE(!=, __hneu)
SIMT_BF16_COMPARE(<, __hlt)
SIMT_BF16_COMPARE(>, __hgt)
SIMT_BF16_COMPARE(<=, __hle)
SIMT_BF16_COMPARE(>=, __hge)
inline bool __hne(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) < float(b) || float(a) > float(b); }

inline __nv_bfloat16 operator+(const __nv_bfloat16 &a) { return a; }
inline __nv_bfloat16 operator-(const __nv_bfloat16 &a) { return __nv_bfloat16(-float(a)); }
inline __nv_bfloat16 &operator++(__nv_bfloat16 &a) { return a = a + __nv_bfloat16(1.0f); }
inline __nv_bfloat16 &operator--(__nv_bfloat16 &a) { return a = a - __nv_bfloat16(1.0f); }
inline __nv_bfloat16 __hneg(__nv_bfloat16 a) { return -a; }
inline __nv_bfloat16 __habs(__nv_bfloat16 a) { return __nv_bfloat16(fabsf(float(a))); }
inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) { return fmaxf(float(a), float(b)); }
inline __nv_bfloat16 __hmin(__nv_bfloat16 a, __nv_bfloat16 b) { return fminf(float(a), float(b)); }
inline bool __hisnan(__nv_bfloat16 a) { return (a.__x & 0x7FFF) > 0x7F80; }
inline int __hisinf(__nv_bfloat16 a) { return a.__x == 0x7F80 ? 1 : a.__x == 0xFF80 ? -1 : 0; }
// one rounding: the product is exact in double, their sum rounds to odd before it rounds to bf16
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    double product = double(float(a)) * double(float(b)), addend = double(float(c));
    double sum = product + addend;
    double part = sum - product, lost = (product - (sum - part)) + (addend - part);
    if (lost != 0 && lost == lost && fabs(sum) <= DBL_MAX) {
        uint64_t bits = simt::bit_cast<uint64_t>(sum);
        if ((lost < 0) != (sum < 0)) bits -= 1;
        sum = simt::bit_cast<double>(bits | 1u);
    }
    return __nv_bfloat16(sum);
}

#define SIMT_BF16_FUNCTION(name, f) \
    inline __nv_bfloat16 name(__nv_bfloat16 a) { return __nv_bfloat16(f(float(a))); }
SIMT_BF16_FUNCTION(hexp, expf)
SIMT_BF16_FUNCTION(hexp2, exp2f)
SIMT_BF16_FUNCTION(hlog, logf)
SIMT_BF16_FUNCTION(hlog2, log2f)
SIMT_BF16_FUNCTION(hsqrt, sqrtf)
SIMT_BF16_FUNCTION(hrsqrt, __frsqrt_rn)
SIMT_BF16_FUNCTION(hrcp, __frcp_rn)
SIMT_BF16_FUNCTION(hsin, sinf)
SIMT_BF16_FUNCTION(hcos, cosf)
SIMT_BF16_FUNCTION(htanh, tanhf)
SIMT_BF16_FUNCTION(hfloor, floorf)
SIMT_BF16_FUNCTION(hceil, ceilf)

// --- pairs ----------------------------------------------------------------------------------------

inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __nv_bfloat162 __float2bfloat162_rn(float a) { return {a, a}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return make_float2(a.x, a.y); }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
inline float __low2float(__nv_bfloat162 a) { return a.x; }
inline float __high2float(__nv_bfloat162 a) { return a.y; }
inline __nv_bfloat162 __hneg2(__nv_bfloat162 a) { return {-a.x, -a.y}; }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
