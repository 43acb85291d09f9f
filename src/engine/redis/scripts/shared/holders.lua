-- The holders of a shared name, and its hand-off. Placed after queue.lua in the scripts of shared names.
--
-- A sorted set has the holders. The score of a member is the end of its lease in ms since 1970, and a member is
--
--   <permits>/<limit> <fencing token> <owner>[-kept] <ms of the grant> <pid>[:0] <host>[<line feed><metadata>]
--   <permits>/<limit> 0 <owner>-next      reserved for a waiter that makes an attempt
--
-- A share fits while the permits in use and its own are together at most the smallest limit of all. A script reads all members of a name:
-- some 0.1 ms for 100 of them.

-- What `read` has read: the key, the time, the members by their owners, the permits in use, and the smallest limit.
local set, ms, members, used, least

local function count(member, own, reserved)
  local permits, limit, owner = string.match(member, '^(%d+)/(%d+) %d+ (%S+)')
  members[owner] = member
  if owner ~= own and owner ~= reserved then
    used, least = used + permits, math.min(least, limit)
  end
end

-- Reads the holders of a name, and removes those whose lease has ended. Does not count what `own` and `reserved` have.
local function read(key, own, reserved)
  set, ms = key, math.floor(microseconds() / 1000)
  members, used, least = {}, 0, math.huge
  local all, ended = redis.call('ZRANGEBYSCORE', key, '-inf', '+inf', 'WITHSCORES'), {}
  for i = 1, #all, 2 do
    if tonumber(all[i + 1]) <= ms then
      ended[#ended + 1] = all[i]
    else
      count(all[i], own, reserved)
    end
  end
  for i = 1, #ended, 1000 do
    redis.call('ZREM', key, unpack(ended, i, math.min(i + 999, #ended)))
  end
end

-- Whether a share fits beside those that were counted.
local function is_within(permits, limit)
  return used + permits <= math.min(least, limit)
end

-- Writes a member whose lease ends after `left` ms. The set lasts until the last end.
local function write(member, left)
  redis.call('ZADD', set, ms + left, member)
  if redis.call('PTTL', set) < left then
    redis.call('PEXPIRE', set, left)
  end
end

-- Makes `fence` the last fencing token: in a cluster that of the name, for a day longer than its longest lease.
local function draw(fence, companion)
  if LAST then
    redis.call('SET', LAST, fence)
  else
    redis.call('SET', companion, fence, 'PX', redis.call('PTTL', set) + FENCE_KEPT_MS)
  end
end

fits = function(waiter)
  return is_within(string.match(waiter, ':(%d+)/(%d+)'))
end

give = function(_, companion, waiter, owner, grant, now, left)
  -- The message has the same end.
  ms = now
  local member = string.match(waiter, ':(%d+/%d+)') .. ' ' .. (grant or '0 ' .. owner .. '-next')
  write(member, left)
  count(member)
  if grant then
    draw(string.match(grant, '^%d+'), companion)
  end
end

-- Answers the time until the first end of a lease, in ms; -2 without a holder.
local function first_left()
  local first = redis.call('ZRANGEBYSCORE', set, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  return first and first - ms or -2
end

left_of = function(key)
  read(key)
  return first_left()
end

held_until = function(key, _, owner)
  read(key)
  local member = members[owner]
  if member then
    return tonumber(redis.call('ZSCORE', key, member)), string.match(member, '^%S+ %d+ %x+ %d+ %d+:0 ')
  end
end

