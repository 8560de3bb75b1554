#include "tables/drive/table_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace dejax {
namespace {

using offload::Chunk;

// How the file of a table is opened: past the page cache where the file system can.
int Open(const std::string& path, bool* direct) {
  if (*direct) {
    const int found = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (found >= 0 || errno != EINVAL) return found;
    *direct = false;
  }
  const int found = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (found >= 0) posix_fadvise(found, 0, 0, POSIX_FADV_RANDOM);
  return found;
}

}  // namespace

TableFiles::TableFiles(const std::vector<std::string>& paths, const TableLayout& layout, bool direct)
    : layout_(layout), direct_(direct) {
  try {
    for (size_t k = 0; k < paths.size(); ++k) {
      File& file = files_.emplace_back();
      file.path = paths[k];
      file.descriptor = Open(file.path, &direct_);
      if (file.descriptor < 0) throw std::runtime_error(file.path + ": " + std::strerror(errno));
    }
    for (int k = 0; k < count(); ++k) {
      File& file = files_[k];
      file.end = EndOf(k);
      struct stat now;
      if (fstat(file.descriptor, &now) != 0) throw std::runtime_error(file.path + ": " + std::strerror(errno));
      file.written = now.st_mtim;
      if (now.st_size < file.end) {
        throw std::runtime_error(file.path + " must have " + std::to_string(file.end) + " bytes for the rows of the table, and has " +
                                 std::to_string(now.st_size) + "; copy or write it again");
      }
    }
  } catch (...) {
    for (const File& file : files_) {
      if (file.descriptor >= 0) close(file.descriptor);
    }
    throw;
  }
}

TableFiles::~TableFiles() {
  for (const File& file : files_) close(file.descriptor);
}

// The end of the last row of a file.
int64_t TableFiles::EndOf(int file) const {
  const int64_t stripes = (layout_.rows + layout_.stripe_rows - 1) / layout_.stripe_rows;
  if (layout_.rows == 0 || file >= stripes) return 0;
  const int64_t last = stripes - 1 - (stripes - 1 - file) % count();  // the last stripe of the file
  const int64_t row = std::min(layout_.rows, (last + 1) * layout_.stripe_rows) - 1;
  return PlaceOf(row).offset + layout_.row_bytes;
}

void TableFiles::Write(const Chunk& chunk, const void*) {
  throw std::runtime_error(Name(chunk) + ": tables on a drive are for reading");
}

void TableFiles::Read(const Chunk& chunk, void* data) {
  const File& file = files_[chunk.file];
  auto* at = static_cast<char*>(data);
  int64_t offset = chunk.offset, left = chunk.bytes;
  while (left > 0) {
    const ssize_t got = pread(file.descriptor, at, static_cast<size_t>(left), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw std::runtime_error("reading bytes " + std::to_string(chunk.offset) + " to " +
                               std::to_string(chunk.offset + chunk.bytes) + " of " + file.path + " failed: " +
                               std::strerror(errno) + "; look after the drive, or copy the file to another one");
    }
    at += got;
    offset += got;
    left -= got;
    // A read past the page cache ends with the file, which need not be a whole number of pages.
    if (got == 0 || offset % offload::kPage != 0) {
      if (offset >= file.end) return;
      if (got == 0) {
        throw std::runtime_error(file.path + " became shorter than its rows while the table was used: it ends at byte " +
                                 std::to_string(offset) + " of " + std::to_string(file.end) +
                                 "; write it again, and open the table again");
      }
    }
  }
}

void TableFiles::RequireUnchanged() const {
  for (const File& file : files_) {
    struct stat now;
    if (fstat(file.descriptor, &now) != 0) throw std::runtime_error(file.path + ": " + std::strerror(errno));
    if (now.st_size < file.end) {
      throw std::runtime_error(file.path + " became shorter than its rows while the table was used; write it again, and open the "
                                           "table again");
    }
    if (now.st_mtim.tv_sec != file.written.tv_sec || now.st_mtim.tv_nsec != file.written.tv_nsec) {
      throw std::runtime_error(file.path + " was written while the table was used; open the table again");
    }
  }
}

std::vector<std::string> TableFiles::OpenPaths() const {
  std::vector<std::string> paths;
  for (const File& file : files_) paths.push_back("/proc/self/fd/" + std::to_string(file.descriptor));
  return paths;
}

}  // namespace dejax
