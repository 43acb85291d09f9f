-- Releases the names that the owner holds, removes its positions in their queues, and hands each name off.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their queues
--         2n+1 .. 3n     their fence companions
--         3n+1 .. 4n     their metadata companions, only when there is metadata
-- ARGV    1  the owner's token
--         2  the number of names
--         3  where waiters are notified, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         4  the waiter's member of the queues, or nothing for a claim that did not wait
--         5  how long the fence companions outlast the release, in ms; 0 when they go with it
--         6  how long the names stay busy, in ms; without it they are free at once
-- Answer  1 when the owner held every name, else 0; and 2 more when another call has to hand names off

local n, to, me = tonumber(ARGV[2]), ARGV[3], ARGV[4]

local held, answer = 0, 0
for i = 1, n do
  local queue, fence, metadata = KEYS[n + i], KEYS[n + n + i], KEYS[n + n + n + i]
  local done, more = release_one(KEYS[i], queue, fence, metadata, owner, me, to, fences_last, keep)
  if done then
    held = held + 1
  end
  if more then
    answer = 2
  end
end
return answer + (held == n and 1 or 0)
