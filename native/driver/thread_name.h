// The name that debuggers and `top -H` show for a thread.
#pragma once

#ifdef __linux__
#include <pthread.h>
#endif

namespace dejax {

// Names the calling thread. `name` must have at most 15 characters; Linux refuses longer ones.
inline void NameThisThread(const char* name) {
#ifdef __linux__
  pthread_setname_np(pthread_self(), name);
#else
  (void)name;
#endif
}

}  // namespace dejax
