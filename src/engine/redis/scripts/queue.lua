-- The queue of a name, and the hand-off of the name. Placed before every script that may hand off.
--
-- A queue is a sorted set with three kinds of members:
--
--   <process>:<owner>[:<pid>@<host>][:<permits>/<limit>][:<ttl>]
--                a waiter, with its share of a shared name, and its ttl in ms if that is less than ALIVE_MS; its score is its
--                number, by which it is served: the microsecond of its arrival
--   <process>    a process with waiters; its score is minus the millisecond until which it counts as alive
--   !<process>   a process whose waiters were removed as dead; its score is minus the millisecond of the removal. The answer
--                to its next heartbeat is "try again", and its waiters enter again with their numbers
--
-- The hand-off makes a waiter with <pid>@<host> the holder, for as long as its process counts as alive, or for its ttl. Its
-- process extends the lease. Any other waiter (of several names, with metadata, with minReplicas) has to confirm within this
-- time. Until then the lock's key holds `<owner>-next`: the name is busy for every other owner, other tools included, and has no
-- holder. So a dead waiter delays the others for no longer than its lease would have.
--
-- A lock goes to the first live waiter. A shared name (shared/holders.lua) goes to the first live waiters, as long as the next one fits.

-- The time between two heartbeats: HEARTBEAT_INTERVAL in src/engine/local_waiters/mod.rs.
local HEARTBEAT_MS = 2000
-- How long a process counts as alive after a command of it: WAITER_LIVENESS in src/engine/mod.rs.
local ALIVE_MS = 4500
-- How long the mark of removed waiters lasts.
local KEPT_MS = 60000
-- An untouched queue expires a little later than the last mark in it.
local QUEUE_MS = 70000
-- One script reads AT_ONCE * ROUNDS waiters at most, so that it blocks the server for a few milliseconds.
local AT_ONCE, ROUNDS = 32, 8

-- How long a fence companion outlives the lease (src/engine/redis/keys/mod.rs): with the last token of all names, and without it.
local RECORD_KEPT_MS, FENCE_KEPT_MS = 3660000, 86400000

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

-- Returns the next fencing token: at least `fence`, and larger than the last one in `key`.
local function larger(fence, key)
  local last = redis.call('GET', key)
  local known = last and tonumber(string.match(last, '^%d+'))
  return known and known >= fence and known + 1 or fence
end

-- Adds the waiter `me` to a queue. A waiter that is in it keeps its number, which is 0 when it has none yet. Answers its number.
local function enter(queue, me, number)
  local now = microseconds()
  if number == 0 then
    local last = redis.call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
    number = math.max(now, (tonumber(last) or 0) + 1)
  end
  redis.call('ZADD', queue, 'NX', number, me)
  redis.call('ZADD', queue, 'LT', -(math.floor(now / 1000) + ALIVE_MS), string.match(me, '^%x+'))
  redis.call('PEXPIRE', queue, QUEUE_MS)
  return number
end

-- What differs between a lock and a shared name, for which shared/holders.lua sets these functions.
--
-- fits(waiter): whether a waiter can have a shared name now. A lock that is handed off is free.
-- left_of(key), held_until(key, companion, owner): see heartbeat.lua and remove_waiter.lua
local fits, left_of, held_until

-- Makes a waiter the holder of a name for `left` ms, with the record `grant`, or reserves the name for it. Answers what `pass`
-- answers, or nil when more waiters may fit; true: the waiter keeps its position.
local give = function(lock, companion, waiter, owner, grant, ms, left)
  redis.call('SET', lock, grant and owner or owner .. '-next', 'PXAT', ms + left)
  if not grant then
    return true
  end
  redis.call('SET', companion, grant, 'PX', left + (LAST and RECORD_KEPT_MS or FENCE_KEPT_MS))
  if LAST then
    redis.call('SET', LAST, string.match(grant, '^%d+'))
  end
  return 'granted'
end

-- Hands a name that is free, or about to be, to the first live waiter, and notifies that one alone: its process gets the
-- waiter's member of the queue and the lock key. Removes dead waiters in front of it. In front of the member the message to
-- a waiter that is the holder now has `grant:<fencing token>:<µs of the grant>:<ms of its end>` and a space. A shared name is handed to
-- all first live waiters that fit.
--
-- Answers true when it handed the lock off, and 'granted' when the waiter is the holder now; true when the next waiter of a shared name
-- does not fit; false when the next waiter is `me` or has a number larger than `number`, or when there is none; nil when it reached the
-- limit of removed waiters for one script: the caller has to call again. The process of `me` counts as alive, because it made this call.
-- With `notify_only` the first waiter is notified, but does not get the name. `to` and the process form the channel; in a cluster it is
-- in the slot of the keys.
local function pass(lock, queue, companion, to, me, number, notify_only)
  -- A server that refuses writes (read-only, full, without replicas) refuses this one. From here on it executes the script to its
  -- end, so that no message announces a grant that was not written.
  redis.call('PEXPIRE', queue, QUEUE_MS)
  local publish = string.find(to, '{', 1, true) and 'SPUBLISH' or 'PUBLISH'
  -- `alive`: until when each process counts as alive; -1: its waiters were found dead.
  local now, alive = microseconds(), {}
  local ms = math.floor(now / 1000)
  local asks = me and string.match(me, '^%x+')
  for _ = 1, ROUNDS do
    local waiters = redis.call('ZRANGEBYSCORE', queue, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, AT_ONCE)
    -- `gone`: the waiters that leave the queue. `given`: for how long each process got the name.
    local gone, given, is_granted, result = {}, {}, false, nil
    for i = 1, #waiters, 2 do
      local waiter = waiters[i]
      if waiter == me or number and tonumber(waiters[i + 1]) > number then
        result = false
        break
      end
      local process, owner = string.match(waiter, '^(%x+):(%x+)')
      local till = alive[process]
      if not till then
        till = process == asks and ms + ALIVE_MS or -(tonumber(redis.call('ZSCORE', queue, process)) or 0)
      end
      if till > ms then
        if fits and not notify_only and not fits(waiter) then
          result = true
          break
        end
        local rest, message, grant = #process + #owner + 2, waiter .. ' ' .. lock, nil
        local ttl = tonumber(string.match(waiter, ':(%d+)$', rest))
        local pid, host = string.match(waiter, '^:(%d+)@([^:]+)', rest)
        local left = math.min(till - ms, ttl or ALIVE_MS)
        if pid and not notify_only then
          local fence = larger(now, LAST or companion)
          -- `:0` after the process id: no attempt has found the grant yet (remove_waiter.lua).
          grant = string.format('%.0f %s %.0f %s:0 %s', fence, owner, ms, pid, host)
          message = string.format('grant:%.0f:%.0f:%.0f %s', fence, now, ms + left, message)
        end
        -- A process without a connection receives no messages. Its waiters enter again when it has one.
        if redis.call(publish, to .. process, message) == 0 then
          till = ms
        elseif notify_only then
          result = true
        else
          result = give(lock, companion, waiter, owner, grant, ms, left)
          given[process] = math.min(left, given[process] or left)
          if result ~= true then
            is_granted, gone[#gone + 1] = true, waiter
          end
        end
      end
      if till <= ms then
        if till >= 0 then
          redis.call('ZREM', queue, process)
          redis.call('ZADD', queue, -ms, '!' .. process)
          till = -1
        end
        gone[#gone + 1] = waiter
      end
      alive[process] = till
      if result ~= nil then
        break
      end
    end
    if #gone > 0 then
      redis.call('ZREM', queue, unpack(gone))
    end
    if is_granted and #redis.call('ZRANGEBYSCORE', queue, 0, '+inf', 'LIMIT', 0, 1) == 0 then
      clear(queue)
      return result or false
    end
    for process, left in pairs(given) do
      -- The process has to send a command. Until then it gets no other name: a stopped process delays the waiters
      -- behind it once, and not once for each of its waiters.
      redis.call('ZADD', queue, -(ms + left), process)
      if left < HEARTBEAT_MS then
        -- The time ends before the next heartbeat: ask another process to send one at its end.
        for _, other in ipairs(redis.call('ZRANGEBYSCORE', queue, '-inf', '(' .. -ms, 'LIMIT', 0, AT_ONCE)) do
          if other ~= process and redis.call(publish, to .. other, 'wait:' .. left .. ' ' .. lock) > 0 then
            break
          end
        end
      end
    end
    if result ~= nil then
      return result
    end
    if #waiters < AT_ONCE * 2 then
      clear(queue)
      return false
    end
  end
  return nil
end

