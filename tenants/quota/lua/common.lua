-- The arithmetic of rules.py, for the scripts beside this file (each is sent with this text before it).
-- All numbers are integers below 2^53, which doubles hold exactly.
--
-- One hash holds a tenant's counters by identity, as space-separated integers:
--   window       start_us end_us used held      (end_us 0: never)
--   bucket       level at_ms held               (level in units * scale)
--   concurrency  held
-- A window that is over stays, as `identity@start_us`, while something is held on it.
-- One hash holds the tenant's holds by request id (MessagePack), one sorted set their lease ends.

local READY = '#ready'

-- tostring() would round to 14 digits.
local function text(number)
  return string.format('%.0f', number)
end

-- The server's clock, which all gateways share; tests pass a time of their own.
local function clock_us(override)
  if override ~= '0' then
    return tonumber(override)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function parse(raw)
  if not raw then
    return nil
  end
  local numbers = {}
  for number in string.gmatch(raw, '%d+') do
    numbers[#numbers + 1] = tonumber(number)
  end
  return numbers
end

local function store(counters, name, counter)
  local parts = {}
  for i = 1, #counter do
    parts[i] = text(counter[i])
  end
  redis.call('HSET', counters, name, table.concat(parts, ' '))
end

-- rules._refill; fmod keeps the quotient exact where a rounded division might not be.
local function refill(limit, level, since_ms)
  local cap = limit.amount * limit.scale
  if level > cap then
    level = cap
  end
  local missing = cap - level
  if since_ms > (missing - math.fmod(missing, limit.rate)) / limit.rate then
    return cap
  end
  if since_ms < 0 then
    since_ms = 0
  end
  return level + limit.rate * since_ms
end

-- rules.advance for buckets.
local function advance_bucket(limit, counter, now_us)
  local now_ms = math.floor(now_us / 1000)
  if not counter then
    return {limit.amount * limit.scale, now_ms, 0}
  end
  local at_ms = counter[2]
  return {refill(limit, counter[1], now_ms - at_ms), math.max(now_ms, at_ms), counter[3]}
end

-- rules.room, before it is cut off at zero.
local function room(limit, counter)
  if limit.shape == 'w' then
    return limit.amount - counter[3] - counter[4]
  elseif limit.shape == 'b' then
    return math.floor(counter[1] / limit.scale) - counter[3]
  end
  return limit.amount - counter[1]
end

-- `held` is the last number of every kind of counter.
local function add_held(counter, amount)
  counter[#counter] = counter[#counter] + amount
end

-- The counter that a hold was taken from (nil: forgotten), and the name it is stored under.
local function locate(keys, held)
  local counter = parse(redis.call('HGET', keys.counters, held.name))
  if held.shape == 'w' and (not counter or counter[1] ~= held.start) then
    local name = held.name .. '@' .. text(held.start)
    return parse(redis.call('HGET', keys.counters, name)), name
  end
  return counter, held.name
end

local function store_located(keys, held, name, counter)
  if name ~= held.name and counter[4] == 0 then
    redis.call('HDEL', keys.counters, name)
  else
    store(keys.counters, name, counter)
  end
end

-- Before a new window takes the place of one that is over.
local function keep_window(keys, name, over)
  if over[4] > 0 then
    store(keys.counters, name .. '@' .. text(over[1]), over)
  end
end

-- Ends a hold: rules.settle on every counter it was taken from. `actual` is by meter number; nil: nothing used.
local function finish(keys, request_id, hold, now_us, actual)
  for _, held in ipairs(hold.on) do
    local counter, name = locate(keys, held)
    if counter then
      local used = actual and actual[held.meter] or 0
      if held.shape == 'w' then
        counter[3] = counter[3] + used
      elseif held.shape == 'b' then
        counter = advance_bucket(held, counter, now_us)
        counter[1] = math.max(0, counter[1] - used * held.scale)
      end
      add_held(counter, -held.wanted)
      store_located(keys, held, name, counter)
    end
  end
  redis.call('HDEL', keys.holds, request_id)
  redis.call('ZREM', keys.leases, request_id)
end

-- What a grant tells its caller: the limits as they were reserved, the windows, the counters now.
local function granted(keys, hold, now_us)
  local starts, raws = {}, {}
  for i, held in ipairs(hold.on) do
    starts[i] = text(held.start)
    raws[i] = redis.call('HGET', keys.counters, held.name) or ''
  end
  return {'granted', text(now_us), hold.limits, starts, raws}
end

local keys = {counters = KEYS[1], leases = KEYS[2], holds = KEYS[3]}
local now_us = clock_us(ARGV[1])
