// The kernel that checks predicted handles, as PTX.
#pragma once

namespace dejax::offload {

// Compares a handle with the launch thread's prediction. Where they differ: *failed = run, data = all ones, which is NaN in
// the floating-point formats, and flag = {predicted, found, run}. It also fills data where the run has failed before.
//
// The host reads the flag's three words together. flag[3] counts the mismatches that the host has read, failed[2] those
// that kernels have begun to report. Only where the two are equal may one thread of one kernel increment failed[2] and
// write the flag. It writes the word that the host polls last. Kernels that find a mismatch meanwhile leave the flag alone.
inline constexpr char kCheckKernel[] = R"(
.version 6.4
.target sm_50
.address_size 64
.visible .entry dejax_offload_check(
  .param .u64 handle, .param .u64 predicted, .param .u64 data, .param .u64 bytes, .param .u64 flag,
  .param .u64 failed, .param .u64 run)
{
  .reg .pred %p<6>;
  .reg .b16 %h<2>;
  .reg .b32 %r<10>;
  .reg .b64 %d<20>;
  ld.param.u64 %d1, [handle];
  ld.param.u64 %d2, [predicted];
  ld.u32 %r1, [%d1];
  ld.u32 %r2, [%d1+4];
  mov.b64 %d3, {%r1, %r2};
  ld.param.u64 %d10, [failed];
  ld.param.u64 %d11, [run];
  setp.eq.u64 %p1, %d2, %d3;
  @%p1 bra SAME;
  st.volatile.u64 [%d10], %d11;
  mov.u32 %r6, %ctaid.x;
  mov.u32 %r7, %tid.x;
  or.b32 %r6, %r6, %r7;
  setp.ne.u32 %p4, %r6, 0;
  @%p4 bra FILL;
  ld.param.u64 %d6, [flag];
  ld.volatile.u64 %d12, [%d6+24];
  add.u64 %d13, %d12, 1;
  atom.cas.b64 %d14, [%d10+16], %d12, %d13;
  setp.ne.u64 %p5, %d14, %d12;
  @%p5 bra FILL;
  st.volatile.u64 [%d6+16], %d11;
  st.volatile.u64 [%d6+8], %d3;
  membar.sys;
  st.volatile.u64 [%d6], %d2;
  bra FILL;
SAME:
  ld.volatile.u64 %d15, [%d10];
  setp.ne.u64 %p3, %d15, %d11;
  @%p3 bra DONE;
FILL:
  ld.param.u64 %d4, [data];
  ld.param.u64 %d5, [bytes];
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.u32 %r3, %r3, %r4, %r5;
  cvt.u64.u32 %d7, %r3;
  mov.u32 %r5, %nctaid.x;
  mul.lo.u32 %r4, %r4, %r5;
  cvt.u64.u32 %d8, %r4;
  mov.u16 %h1, 255;
LOOP:
  setp.ge.u64 %p2, %d7, %d5;
  @%p2 bra DONE;
  add.u64 %d9, %d4, %d7;
  st.u8 [%d9], %h1;
  add.u64 %d7, %d7, %d8;
  bra LOOP;
DONE:
  ret;
}
)";

}  // namespace dejax::offload
