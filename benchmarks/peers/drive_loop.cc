// The drive's own rate: reads of one size at a queue depth, past the page cache, and nothing else (Linux AIO, as fio's
// engine libaio). benchmarks/drive.py compiles it.
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

// Reads blocks[0 .. count), numbers of blocks in the file, into the places of a memory of `places` blocks one after the
// other: at least `depth`. Returns seconds; below 0 where a call failed.
extern "C" double read_blocks(const char* path, int64_t block_bytes, const int64_t* blocks, int64_t count, int depth,
                              int64_t places) {
  const int file = open(path, O_RDONLY | O_DIRECT);
  aio_context_t context = 0;
  if (file < 0 || syscall(SYS_io_setup, depth, &context) != 0) return -1;
  void* memory = nullptr;
  const size_t size = static_cast<size_t>(places) * block_bytes;
  if (posix_memalign(&memory, 2 << 20, size) != 0) return -1;
  madvise(memory, size, MADV_HUGEPAGE);  // a virtual drive reads faster into pages that lie together
  std::memset(memory, 0, size);
  std::vector<iocb> reads(depth);
  std::vector<io_event> ended(depth);
  std::vector<iocb*> ready;
  for (iocb& read : reads) ready.push_back(&read);
  int64_t next = 0, done = 0;
  bool failed = false;
  const auto begin = std::chrono::steady_clock::now();
  while (done < count && !failed) {
    std::vector<iocb*> submitted;
    while (!ready.empty() && next < count) {
      iocb* read = ready.back();
      ready.pop_back();
      *read = {};
      read->aio_lio_opcode = IOCB_CMD_PREAD;
      read->aio_fildes = file;
      read->aio_buf = reinterpret_cast<uint64_t>(memory) + next % places * block_bytes;
      read->aio_nbytes = block_bytes;
      read->aio_offset = blocks[next++] * block_bytes;
      submitted.push_back(read);
    }
    for (size_t at = 0; at < submitted.size() && !failed;) {
      const long sent = syscall(SYS_io_submit, context, submitted.size() - at, submitted.data() + at);
      failed = sent <= 0 && errno != EAGAIN && errno != EINTR;
      at += sent > 0 ? sent : 0;
    }
    const long got = failed ? -1 : syscall(SYS_io_getevents, context, 1, depth, ended.data(), nullptr);
    failed = failed || (got <= 0 && errno != EINTR);
    for (long k = 0; k < got; ++k) {
      failed = failed || ended[k].res != block_bytes;
      ready.push_back(reinterpret_cast<iocb*>(ended[k].obj));
    }
    done += got > 0 ? got : 0;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  syscall(SYS_io_destroy, context);
  free(memory);
  close(file);
  return failed ? -1 : seconds;
}
