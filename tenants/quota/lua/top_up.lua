-- Charges buckets with what was used, then raises a live hold on the limits it was reserved on, or on none.
-- ARGV: now_us, epoch, spare, request id, used by meter, first by meter, ahead by meter

if is_lost() then
  return {'lost'}
end
told = ARGV[3]
local request_id = ARGV[4]
local hold = find_hold(request_id)
if not hold then
  return {'gone'}
end
local used, first, ahead = by_meter(5), by_meter(5 + METERS), by_meter(5 + 2 * METERS)
local too_much = overrun(hold, used)
if too_much then
  return too_much
end

local found, names, would_deny, refused = {}, {}, {}, false
for i, part in ipairs(hold.on) do
  local counter, name = locate(part)
  if counter then
    use(counter, part, used[part.meter])
    store_located(part, name, counter)
  end
  found[i], names[i] = counter, name
  if is_short(counter, part, first[part.meter], 0) then
    if part.mode == HARD then
      refused = true
    elseif part.mode == SHADOW then
      would_deny[#would_deny + 1] = i
    end
  end
end
if refused then
  store_hold(request_id, hold)
  local mine, current, parts = {}, {}, {}
  for i, part in ipairs(hold.on) do
    mine[i] = found[i] and redis.call('HGET', hash_of(part.home), names[i]) or ''
    current[i] = redis.call('HGET', hash_of(part.home), part.name) or ''
    parts[i] = {part.held, part.charged, part.most}
  end
  return {'denied', now_us, hold.limits, current, parts, mine}
end

for i, part in ipairs(hold.on) do
  if found[i] then
    -- Of a bucket only what the next step needs.
    local upto = part.shape == 'b' and first[part.meter] or ahead[part.meter]
    reach(found[i], part, upto, 0)
    store_located(part, names[i], found[i])
  end
end
for meter = 1, METERS do
  hold.ahead[meter] = math.max(hold.ahead[meter], ahead[meter])
end
store_hold(request_id, hold)
return granted(hold, would_deny)
