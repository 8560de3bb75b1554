// The files of a table on a drive: where each row lies, and reads of whole blocks of them.
#pragma once

#include <sys/types.h>
#include <time.h>

#include <cstdint>
#include <string>
#include <vector>

#include "blocks/block_source.h"

namespace dejax {

// Rows lie in stripes, which go to the files in turn; a file of another program is one file with one stripe.
struct TableLayout {
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t first = 0;         // bytes of each file before its first stripe
  int64_t stripe_rows = 0;   // rows of a stripe, one after the other
  int64_t stripe_bytes = 0;  // from the beginning of a stripe to that of the next one in its file
};

class TableFiles : public offload::BlockSource {
 public:
  // direct: reads go past the page cache, where the file system can.
  // Throws std::runtime_error where a file cannot be opened or is shorter than the layout says.
  TableFiles(const std::vector<std::string>& paths, const TableLayout& layout, bool direct);
  ~TableFiles() override;
  TableFiles(const TableFiles&) = delete;

  const TableLayout& layout() const { return layout_; }
  bool direct() const { return direct_; }
  int count() const { return static_cast<int>(files_.size()); }

  struct Place {
    int file;
    int64_t offset;
  };
  Place PlaceOf(int64_t row) const {
    const int64_t stripe = row / layout_.stripe_rows, count = static_cast<int64_t>(files_.size());
    const int64_t begin = layout_.first + stripe / count * layout_.stripe_bytes;
    return {static_cast<int>(stripe % count), begin + row % layout_.stripe_rows * layout_.row_bytes};
  }

  std::string Name(const offload::Chunk& chunk) const override { return files_[chunk.file].path; }
  [[noreturn]] void Write(const offload::Chunk& chunk, const void* data) override;
  void Read(const offload::Chunk& chunk, void* data) override;
  int Descriptor(const offload::Chunk& chunk) const override { return files_[chunk.file].descriptor; }

  // Throws std::runtime_error where a file became shorter or was written since it was opened.
  void RequireUnchanged() const;

  // Paths by which this process reads the open files, whatever their names lead to by now.
  std::vector<std::string> OpenPaths() const;

 private:
  struct File {
    std::string path;
    int descriptor = -1;
    int64_t end = 0;  // of its last row
    struct timespec written = {};
  };

  int64_t EndOf(int file) const;

  const TableLayout layout_;
  bool direct_;
  std::vector<File> files_;
};

}  // namespace dejax
