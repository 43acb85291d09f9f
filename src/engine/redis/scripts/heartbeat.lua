-- The heartbeat of a process for the names of its waiters. Hands off names that became free, so that the queue moves when the
-- lease of a dead holder expires.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their queues
--         2n+1 .. 3n     their fence companions
-- ARGV    1  where waiters are notified, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         2  the process
-- Answer  for each name its PTTL, for a shared name that of the share that ends first;
--         0: the script removed dead waiters and there may be more: send the next heartbeat at once;
--         -2: the waiters of the process have to make an attempt: positions of theirs were removed (the process
--         counted as dead, or the store was emptied), or the process receives no messages;
--         and at the end the server's clock in microseconds

left_of = left_of or function(lock)
  return redis.call('PTTL', lock)
end

local n = #KEYS / 3
local ms = math.floor(microseconds() / 1000)
local till = ms + ALIVE_MS
local answer = {}
for i = 1, n do
  local queue = KEYS[n + i]
  local left = -2
  if redis.call('ZREM', queue, '!' .. ARGV[2]) == 0 and redis.call('ZSCORE', queue, ARGV[2]) then
    redis.call('ZADD', queue, 'LT', -till, ARGV[2])
    redis.call('PEXPIRE', queue, QUEUE_MS)
    -- Removes the marks of processes that ended long ago, in a queue that is never empty.
    local gone = redis.call('ZRANGEBYSCORE', queue, '(' .. KEPT_MS - ms, '(0', 'LIMIT', 0, AT_ONCE)
    if #gone > 0 then
      redis.call('ZREM', queue, unpack(gone))
    end
    left = left_of(KEYS[i])
    if left == -2 or fits then
      local passed = pass(KEYS[i], queue, KEYS[n + n + i], ARGV[1])
      if passed == nil then
        left = 0
      elseif passed or fits then
        left = left_of(KEYS[i])
      end
    end
  end
  answer[i] = left
end
answer[n + 1] = microseconds()
return answer
