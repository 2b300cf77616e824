// CUDA's arithmetic intrinsics, vector types and bit casts on a CPU. Included by simt.hpp.
//
// The accurate functions (expf, cosf ...) are the C library's; the fast ones (__expf ...) are accurate
// here, too. Never contracted: the compiler gets -ffp-contract=off.
#pragma once

#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
#ifndef HUGE_VALF
#define HUGE_VALF __builtin_huge_valf()
#endif
#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_PI_F 3.141592654f

// Macros and not functions: glibc's <math.h> (and macOS's, __sincosf) declares these names itself.
#define __expf expf
#define __exp10f(x) exp10f(x)
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf
#define __tanhf tanhf

// max and min of two numbers of any type; for floats a NaN gives way to a number, as in CUDA
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) || T(a) != T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) || T(a) != T(a) ? T(b) : T(a);
}

inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return float(1.0 / sqrt(double(a))); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
inline float rsqrt(float a) { return rsqrtf(a); }
inline float __saturatef(float a) { return a > 0.0f ? a < 1.0f ? a : 1.0f : 0.0f; }
#if defined(__APPLE__)
inline void sincosf(float a, float *s, float *c) { *s = sinf(a), *c = cosf(a); }
inline void sincos(double a, double *s, double *c) { *s = sin(a), *c = cos(a); }
inline float exp10f(float a) { return powf(10.0f, a); }
#endif
inline void simt_sincosf(float a, float *s, float *c) { *s = sinf(a), *c = cosf(a); }
#define __sincosf simt_sincosf
inline float sinpif(float a) { return float(sin(M_PI * double(a))); }
inline float cospif(float a) { return float(cos(M_PI * double(a))); }

// --- conversions ----------------------------------------------------------------------------------
// CUDA's float-to-integer conversions saturate and send NaN to 0; x86's instruction gives INT_MIN.

namespace simt {

template <class I, class F>
inline I saturate(F value) {
    if (value != value) return 0;
    const F low = F(std::numeric_limits<I>::min());
    const F high = F(std::numeric_limits<I>::max());  // may round up to one past the greatest
    if (value <= low) return std::numeric_limits<I>::min();
    if (value >= high) return std::numeric_limits<I>::max();
    return I(value);
}

}  // namespace simt

#define SIMT_TO_INTEGER(name, I, F)                                                  \
    inline I name##_rz(F a) { return simt::saturate<I>(a); }                         \
    inline I name##_rn(F a) { return simt::saturate<I>(F(nearbyint(double(a)))); }   \
    inline I name##_rd(F a) { return simt::saturate<I>(F(floor(double(a)))); }       \
    inline I name##_ru(F a) { return simt::saturate<I>(F(ceil(double(a)))); }
SIMT_TO_INTEGER(__float2int, int, float)
SIMT_TO_INTEGER(__float2uint, unsigned, float)
SIMT_TO_INTEGER(__float2ll, long long, float)
SIMT_TO_INTEGER(__float2ull, unsigned long long, float)
SIMT_TO_INTEGER(__double2int, int, double)
SIMT_TO_INTEGER(__double2uint, unsigned, double)
SIMT_TO_INTEGER(__double2ll, long long, double)
inline float __int2float_rn(int a) { return float(a); }
inline float __uint2float_rn(unsigned a) { return float(a); }
inline float __ll2float_rn(long long a) { return float(a); }
inline float __double2float_rn(double a) { return float(a); }
inline double __int2double_rn(int a) { return a; }

namespace simt {

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace simt

inline int __float_as_int(float a) { return simt::bit_cast<int>(a); }
inline unsigned __float_as_uint(float a) { return simt::bit_cast<unsigned>(a); }
inline float __int_as_float(int a) { return simt::bit_cast<float>(a); }
inline float __uint_as_float(unsigned a) { return simt::bit_cast<float>(a); }
inline long long __double_as_longlong(double a) { return simt::bit_cast<long long>(a); }
inline double __longlong_as_double(long long a) { return simt::bit_cast<double>(a); }

inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a ? __builtin_clz(unsigned(a)) : 32; }
inline int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline unsigned __brev(unsigned a) {
    unsigned b = 0;
    for (int i = 0; i < 32; i++) b |= (a >> i & 1u) << (31 - i);
    return b;
}
inline int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((int64_t)a * b >> 32); }

template <class T>
inline T __ldg(const T *p) { return *p; }
template <class T>
inline T __ldcs(const T *p) { return *p; }
template <class T>
inline T __ldcg(const T *p) { return *p; }
template <class T>
inline T __ldca(const T *p) { return *p; }
template <class T>
inline void __stcs(T *p, T v) { *p = v; }
template <class T>
inline void __stcg(T *p, T v) { *p = v; }
inline void __builtin_simt_assume(bool) {}
#define __builtin_assume(x) __builtin_simt_assume(x)

// --- vector types ---------------------------------------------------------------------------------

#define SIMT_VECTORS(T, name, align2, align4)                                                    \
    struct name##1 { T x; };                                                                     \
    struct __attribute__((aligned(align2))) name##2 { T x, y; };                                 \
    struct __attribute__((aligned(align4))) name##4 { T x, y, z, w; };                           \
    inline name##1 make_##name##1(T x) { return name##1{x}; }                                    \
    inline name##2 make_##name##2(T x, T y) { return name##2{x, y}; }                            \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return name##4{x, y, z, w}; }
#define SIMT_VECTOR3(T, name)                                                                    \
    struct name##3 { T x, y, z; };                                                               \
    inline name##3 make_##name##3(T x, T y, T z) { return name##3{x, y, z}; }
SIMT_VECTORS(char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
SIMT_VECTOR3(char, char)
SIMT_VECTOR3(unsigned char, uchar)
SIMT_VECTOR3(int, int)
SIMT_VECTOR3(float, float)
SIMT_VECTOR3(double, double)
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return uint3{x, y, z}; }
