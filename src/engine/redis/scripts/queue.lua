-- The queue of a name, and the hand-off of the name. Placed before every script that may hand off.
--
-- A queue is a sorted set with three kinds of members:
--
--   <process>:<owner>[:<ttl>]  a waiter, with its ttl in ms if that is less than RESERVED_MS; its score is its number, by
--                              which it is served: the microsecond of its arrival
--   <process>                  a process with waiters; its score is minus the millisecond until which it counts as alive
--   !<process>                 a process whose waiters were removed as dead; its score is minus the millisecond of the
--                              removal. The answer to its next heartbeat is "try again", and its waiters enter again with
--                              their numbers
--
-- A waiter that gets a name by hand-off has to confirm within RESERVED_MS or its ttl, so that a dead waiter delays the others
-- for no longer than its lease would have. Until then the lock's key holds `<owner>-next`: the name is busy for every other
-- owner, other tools included, and has no holder.

local RESERVED_MS = 2000
-- How long a process counts as alive after a command of it: WAITER_LIVENESS in src/engine/mod.rs.
local ALIVE_MS = 4500
-- How long the mark of removed waiters lasts.
local KEPT_MS = 60000
-- An untouched queue expires a little later than the last mark in it.
local QUEUE_MS = 70000
-- One script reads AT_ONCE * ROUNDS waiters at most, so that it blocks the server for a few milliseconds.
local AT_ONCE, ROUNDS = 32, 8

-- The server's clock in microseconds since 1970: below 2^53, and so exact in Lua's doubles, until the year 2255.
local function microseconds()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Records that the process of the waiter `me` is alive, if it has waiters in this queue: it has sent a command.
local function mark_alive(queue, me)
  local till = math.floor(microseconds() / 1000) + ALIVE_MS
  redis.call('ZADD', queue, 'XX', 'LT', -till, string.match(me, '^%x+'))
end

-- Deletes a queue without waiters. If many processes are in it, deletes a part.
local function clear(queue)
  local rest = redis.call('ZRANGEBYSCORE', queue, '-inf', '(0', 'LIMIT', 0, AT_ONCE * ROUNDS)
  if #rest < AT_ONCE * ROUNDS then
    redis.call('DEL', queue)
  else
    redis.call('ZREM', queue, unpack(rest))
  end
end

-- Hands a name that is free, or about to be, to the first live waiter, and notifies that one alone: its process gets the
-- waiter's member of the queue and the lock key. Removes dead waiters in front of it.
--
-- Answers true when it handed the name off; false when the next waiter is `me` or has a number larger than `number`, or when
-- there is none; nil when it reached the limit of removed waiters for one script: the caller has to call again. The process of
-- `me` counts as alive, because it made this call. With `notify_only` the waiter is notified, but does not get the name. `to`
-- and the process form the channel; in a cluster it is in the slot of the keys.
local function pass(lock, queue, to, me, number, notify_only)
  local publish = string.find(to, '{', 1, true) and 'SPUBLISH' or 'PUBLISH'
  local ms, alive = math.floor(microseconds() / 1000), {}
  local asks = me and string.match(me, '^%x+')
  for _ = 1, ROUNDS do
    local waiters = redis.call('ZRANGEBYSCORE', queue, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, AT_ONCE)
    local dead, next, process, owner = {}, nil, nil, nil
    for i = 1, #waiters, 2 do
      local waiter = waiters[i]
      if waiter == me or number and tonumber(waiters[i + 1]) > number then
        next = false
        break
      end
      process, owner = string.match(waiter, '^(%x+):(%x+)')
      local till = alive[process]
      if not till then
        till = process == asks and ms + RESERVED_MS or -(tonumber(redis.call('ZSCORE', queue, process)) or 0)
        -- A process without a connection receives no messages. Its waiters enter again when it has one.
        if till > ms and redis.call(publish, to .. process, waiter .. ' ' .. lock) == 0 then
          till = ms
        end
        alive[process] = till
        if till <= ms then
          redis.call('ZREM', queue, process)
          redis.call('ZADD', queue, -ms, '!' .. process)
        end
      end
      if till > ms then
        next = waiter
        break
      end
      dead[#dead + 1] = waiter
    end
    if #dead > 0 then
      redis.call('ZREM', queue, unpack(dead))
    end
    if next and not notify_only then
      local ttl = tonumber(string.match(next, ':(%d+)$', #process + #owner + 2))
      local left = math.min(alive[process] - ms, RESERVED_MS, ttl or RESERVED_MS)
      redis.call('SET', lock, owner .. '-next', 'PX', left)
      -- The process has to confirm. Until then it gets no other name: a stopped process delays the waiters
      -- behind it once, and not once for each of its waiters.
      redis.call('ZADD', queue, -(ms + left), process)
      if left < RESERVED_MS then
        -- The time ends before the next heartbeat: ask another process to send one at its end.
        for _, other in ipairs(redis.call('ZRANGEBYSCORE', queue, '-inf', '(' .. -ms, 'LIMIT', 0, AT_ONCE)) do
          if other ~= process and redis.call(publish, to .. other, 'wait:' .. left .. ' ' .. lock) > 0 then
            break
          end
        end
      end
    end
    if next ~= nil then
      return next and true
    end
    if #waiters < AT_ONCE * 2 then
      clear(queue)
      return false
    end
  end
  return nil
end

