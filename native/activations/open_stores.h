// The open stores of the process, by number.
#pragma once

#include <cstdint>
#include <memory>

namespace dejax::offload {

class Store;

// A store's number: the lowest that no open store has, so that handles always have room for it.
class StoreNumber {
 public:
  StoreNumber();  // throws std::runtime_error where all are taken
  ~StoreNumber() { GiveBack(); }
  StoreNumber(const StoreNumber&) = delete;
  void GiveBack();
  int64_t value() const { return value_; }

 private:
  const int64_t value_;
  bool taken_ = true;
};

void AddOpenStore(const std::shared_ptr<Store>& store);
// From now on no call finds the store, and no binding stands for it.
void RemoveOpenStore(const Store& store);
// Throws std::runtime_error where it is not open.
std::shared_ptr<Store> FindStore(int64_t number);
// Drops what a GPU has stored in a run that failed on another device, in all stores: this device will not fetch it.
void GiveUpRun(int64_t run, int device);

}  // namespace dejax::offload
