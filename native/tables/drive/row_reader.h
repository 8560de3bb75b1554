// Rows of a table on a drive, by ids: from the cache in host memory, and what it lacks from the drive, each block once.
//
// A request has a place for each id. Rows that the cache has are pinned there; missing ones get slots and are read into
// them; where all slots are pinned, as by a request that is larger than the cache, rows go to memory of the request.
// Whoever uses the rows waits for the request, and releases it afterwards.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "blocks/block_queue.h"
#include "tables/drive/row_cache.h"
#include "tables/drive/table_files.h"

namespace dejax {

// An id that means a row on the device: no row of the table, and counted apart.
template <typename Id>
constexpr Id kOnDevice = static_cast<Id>(Id{1} << (sizeof(Id) * 8 - 1));

class RowReader {
 public:
  struct Options {
    std::vector<std::string> paths;
    TableLayout layout;
    char* cache = nullptr;     // slots * row_bytes
    int64_t slots = 0;
    std::vector<uint64_t> wanted;
    std::vector<uint64_t> checksums;  // of each page of each file, file by file; empty: unknown
    std::vector<int64_t> pages;       // of each file, with checksums
    bool direct = true;
    bool use_ring = true;
    int threads = 0;                  // 0: chosen here
    int depth = 128;                  // of a ring
  };

  struct Stats {
    int64_t device_rows = 0, cache_rows = 0, drive_rows = 0;  // where the rows of requests were
    int64_t read_bytes = 0, reads = 0;                        // of the drive, and how many
    int64_t waits = 0;
    double wait_seconds = 0;  // of whoever used the rows
  };

  struct Load;
  struct Request {
    std::vector<int64_t> places;  // of each id: a slot; slots + k for row k of `more`; -1 for none
    std::shared_ptr<char> more;
    int64_t more_rows = 0;
    int64_t outside = -1;  // an id out of range
    bool has_outside = false;
    std::vector<std::shared_ptr<Load>> loads;  // that must end: its own, and others that read rows it needs
    std::shared_ptr<Load> own;                 // that reads the rows which nobody read before; null: none
    bool pinned = true;
  };
  using RequestPtr = std::shared_ptr<Request>;

  // Throws std::runtime_error.
  static std::shared_ptr<RowReader> Open(Options options);
  // Null where there is none, or it was closed.
  static std::shared_ptr<RowReader> Find(int64_t number);
  ~RowReader();

  // Begins to read. clip: ids out of range mean the nearest row. ahead: the rows are not used yet, but will be by another
  // request; those for which the cache has no room are left to it.
  template <typename Id>
  RequestPtr Begin(const Id* ids, int64_t count, bool clip, bool ahead = false);
  // Returns when the rows are there. Throws std::runtime_error with file, row and cause.
  void Wait(const RequestPtr& request);
  void Release(const RequestPtr& request);

  // Keeps a request until it is taken. Of very many that nobody takes, the oldest are released.
  int64_t Keep(RequestPtr request);
  RequestPtr Take(int64_t kept);

  // While it lives, the reader and its cache stay. Throws where the reader was closed.
  class Use {
   public:
    explicit Use(RowReader* reader);
    ~Use();
    Use(const Use&) = delete;

   private:
    RowReader* const reader_;
  };
  // Ends the threads, when those who use it have left.
  void Close();

  int64_t number() const { return number_; }
  const Options& options() const { return options_; }
  const TableFiles& files() const { return files_; }
  const std::string& engine() const { return engine_; }
  Stats GetStats();
  int64_t rows_in_cache();
  int64_t requests_kept();
  void Intercept(std::shared_ptr<offload::Interceptor> interceptor) { files_.Intercept(std::move(interceptor)); }

 private:
  friend struct Load;
  struct Missing {
    int64_t row;
    TableFiles::Place at;
    char* to;
  };

  explicit RowReader(Options options);
  void Start();
  template <typename Id>
  void LookUp(const Id* ids, int64_t count, bool clip, bool ahead, Request* request, const std::shared_ptr<Load>& load);
  void Plan(Load* load) const;
  void Push(const std::shared_ptr<Load>& load);
  void Fail(Load* load, const std::string& why);
  void Ended(Load* load);
  void ForgetRows(const Load& load);
  void LeaveOpenLoads(Load* load);
  void UnpinPlaces(const Request& request);
  void RequireSums(const offload::Chunk& chunk, const char* data) const;

  const Options options_;
  const int64_t number_;
  const pid_t process_;
  TableFiles files_;
  offload::Monitor monitor_;       // of the queue; taken before `mutex_`
  std::condition_variable loaded_;  // a load has ended; the monitor's `changed` tells of each of its chunks
  std::unique_ptr<offload::BlockQueue> queue_;
  std::string engine_;

  std::mutex mutex_;  // of what follows
  RowCache cache_;
  std::vector<std::shared_ptr<Load>> open_loads_;  // in the order of their numbers
  std::vector<int64_t> filled_by_;                 // of each slot: the number of the load that filled it, or does
  int64_t last_load_ = 0;
  Stats stats_;
  std::map<int64_t, RequestPtr> kept_;
  int64_t next_kept_ = 1;
};

}  // namespace dejax
