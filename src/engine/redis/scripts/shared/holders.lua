-- The holders of a shared name, and its hand-off. Placed after queue.lua in the scripts of shared names.
--
-- A sorted set has the holders. The score of a member is the end of its lease in ms since 1970, and a member is
--
--   <permits>/<limit> <fencing token> <owner>[-kept] <ms of the grant> <pid>[:0] <host>[<line feed><metadata>]
--   <permits>/<limit> 0 <owner>-next      reserved for a waiter that makes an attempt
--
-- A share fits while the permits in use and its own are together at most the smallest limit of all. A script reads all members of a name:
-- some 0.1 ms for 100 of them.

-- What `read` has read: the key, the time in µs and in ms, and of the holders the permits in use and the smallest limit.
local set, now, ms, used, least

local function add(permits, limit)
  used, least = used + permits, math.min(least, limit)
end

-- Reads the holders of a name, and removes those whose lease has ended. Adds up the shares, except for the one of `owner`. Answers its
-- member, and whether it is a holder; if not, the permits are reserved for it.
local function read(key, owner)
  set, now, used, least = key, microseconds(), 0, math.huge
  ms = math.floor(now / 1000)
  local find, match, own, is_held = string.find, string.match, nil, nil
  local live = redis.call('ZRANGEBYSCORE', key, '(' .. ms, '+inf')
  for i = 1, #live do
    local token = owner and find(live[i], owner, 1, true) and match(live[i], '^%S+ %d+ (%S+)')
    if token and (token == owner or token == owner .. '-next') then
      own, is_held = live[i], token == owner
    else
      add(match(live[i], '^(%d+)/(%d+)'))
    end
  end
  -- The last member is never removed before another one is written: while a slot moves, a script cannot use a key that it has removed.
  local ended = #live > 0 and redis.call('ZRANGEBYSCORE', key, '-inf', ms, 'LIMIT', 0, 1000) or {}
  if #ended > 0 then
    redis.call('ZREM', key, unpack(ended))
  end
  return own, is_held
end

-- Whether a share fits beside those that were counted.
local function is_within(permits, limit)
  return used + permits <= math.min(least, limit)
end

-- Writes a member whose lease lasts for `ttl` ms, or longer if it does already. The set lasts until the last end. Answers how long it
-- would have lasted.
local function write(member, ttl)
  redis.call('ZADD', set, 'GT', ms + ttl, member)
  local left = redis.call('PTTL', set)
  if left < ttl then
    redis.call('PEXPIRE', set, ttl)
  end
  return left
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

give = function(_, companion, waiter, owner, grant, at, left)
  -- The message has the same end.
  ms = at
  local permits, limit = string.match(waiter, ':(%d+)/(%d+)')
  write(permits .. '/' .. limit .. ' ' .. (grant or '0 ' .. owner .. '-next'), left)
  add(permits, limit)
  if grant then
    draw(string.match(grant, '^%d+'), companion)
  end
end

-- Answers the time until the first end of a lease, in ms; -2 without a holder.
local function first_left()
  local first = redis.call('ZRANGEBYSCORE', set, '(' .. ms, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  return first and first - ms or -2
end

left_of = function(key)
  read(key)
  return first_left()
end

held_until = function(key, _, owner)
  local own, is_held = read(key, owner)
  if is_held then
    return tonumber(redis.call('ZSCORE', key, own)), string.match(own, '^%S+ %d+ %x+ %d+ %d+:0 ')
  end
end

