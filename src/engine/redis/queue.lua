-- The queue of a name, and how the name is handed on. Stands in front of every script that may do so.
--
-- A queue is a sorted set with two kinds of members:
--
--   <process>:<owner>[:<ttl>]  a waiter, with its ttl in ms if that is less than RESERVED_MS; its score is its number, by
--                              which it is served: the microsecond of its arrival
--   <process>                  a process with waiters; its score is minus the millisecond until which it counts as alive
--
-- Whom a name is handed to has to come for it within RESERVED_MS, or its ttl: who died in line is to cost the others no
-- more than it would have in the lock's possession. Until then the lock's key holds `<owner>-next`: busy
-- for everybody else, other tools included, and held by nobody.

local RESERVED_MS = 2000
-- A waiter whose process is silent keeps its place for so long after it ceased to count as alive.
local KEPT_MS = 60000
-- What nobody touches goes away: a little later than the last place in it.
local QUEUE_MS = 70000
local AT_ONCE = 32

-- The server's clock in microseconds since 1970: below 2^53, and so exact in Lua's doubles, until the year 2255.
local function microseconds()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Hands a name that is free, or about to be, to the first live waiter, and tells that one alone: its process gets the
-- waiter's member of the queue and the lock key. Answers whether it did;
-- not when `me`, or a waiter with a larger number, would be the next. The process of `me` is alive, for it asks. With
-- `hint` the waiter is told, but gets nothing. `to` and the process make the channel; in a cluster it lies in the slot of
-- the keys.
local function pass(lock, queue, to, me, number, hint)
  local publish = string.find(to, '{', 1, true) and 'SPUBLISH' or 'PUBLISH'
  local ms, alive, from = math.floor(microseconds() / 1000), {}, 0
  local asks = me and string.match(me, '^%x+')
  while true do
    local waiters = redis.call('ZRANGEBYSCORE', queue, 0, '+inf', 'WITHSCORES', 'LIMIT', from, AT_ONCE)
    for i = 1, #waiters, 2 do
      local waiter = waiters[i]
      if waiter == me or number and tonumber(waiters[i + 1]) > number then
        return false
      end
      local process, owner = string.match(waiter, '^(%x+):(%x+)')
      local till = alive[process]
      if not till then
        till = process == asks and ms + RESERVED_MS or -(tonumber(redis.call('ZSCORE', queue, process)) or 0)
        -- A process whose connection is gone hears nothing. It may come back to its places.
        if till > ms and redis.call(publish, to .. process, waiter .. ' ' .. lock) == 0 then
          till = ms
        end
        alive[process] = till
      end
      if till > ms then
        if not hint then
          local ttl = tonumber(string.match(waiter, ':(%d+)$', #process + #owner + 2))
          local left = math.min(till - ms, RESERVED_MS, ttl or RESERVED_MS)
          redis.call('SET', lock, owner .. '-next', 'PX', left)
          -- It owes an answer. Until that comes, nothing else is handed to this process: one that stands still costs
          -- those behind it so much time once, and not once for each of its waiters.
          redis.call('ZADD', queue, -(ms + left), process)
        end
        return true
      elseif till + KEPT_MS < ms then
        redis.call('ZREM', queue, waiter)
        from = from - 1
      end
    end
    from = from + #waiters / 2
    if #waiters < AT_ONCE * 2 then
      if from == 0 then
        redis.call('DEL', queue)
      end
      return false
    end
  end
end

